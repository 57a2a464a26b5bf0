"""The search environment in front of a real retrieval server, alone and in whole episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import free_port
from llm_agent_world import PASSAGES
from run_config import run_config
from scripted_policy import Script
from served_app import served_app, write_passages

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.retriever import Hit
from search_r1.search.server.retrieval_service import RetrievalService
from verl.agent.environment import Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import decode_turn, encode_text
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt, Status, Trajectory

FEEDBACK = "That was no action."
LIMITS = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=2000)


class PoisonedBm25:
    """BM25 that cannot search for one query."""

    name = "bm25"

    def __init__(self, corpus: Corpus) -> None:
        self._index = Bm25Retriever.build(corpus)

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if "poison" in queries:
            raise RuntimeError("a poisoned query")
        return self._index.search(queries, k)


@pytest.fixture
def poisoned_url(tmp_path: Path) -> Iterator[str]:
    """The address of a server over `PASSAGES` that cannot search for one query."""
    corpus = Corpus(write_passages(tmp_path / "corpus.jsonl", PASSAGES))
    with served_app(create_app(RetrievalService(PoisonedBm25(corpus), corpus))) as url:
        yield f"{url}/retrieve"


def test_what_a_run_depends_on_that_no_setting_says(tmp_path: Path) -> None:
    """The index behind an address, and the text of a template, change without a setting."""
    template = tmp_path / "mine.txt"
    template.write_text("First {question}")

    def sources(url: str, *overrides: str) -> dict[str, str]:
        config = run_config([f"retriever.url={url}", f"agent.template={template}", *overrides], "tinywiki")
        return asyncio.run(SearchEnvironment.sources(config))

    without_search = ("do_search=false", "actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.n=8")
    found = []
    for number in range(2):
        corpus = Corpus(write_passages(tmp_path / f"{number}.jsonl", dict(list(PASSAGES.items())[number:])))
        with served_app(create_app(RetrievalService(Bm25Retriever.build(corpus), corpus))) as url:
            found.append(sources(f"{url}/retrieve"))
            assert sources(f"{url}/retrieve") == found[-1]
            assert set(sources(f"{url}/retrieve", *without_search)) == {"the template"}
    first, second = (one["the retriever's index"] for one in found)
    assert first != second and f"{len(PASSAGES)} passages" in first and f"{len(PASSAGES) - 1} passages" in second
    template.write_text("Second {question}")
    unreachable = sources("http://127.0.0.1:9/retrieve")
    assert set(unreachable) == {"the template"} and unreachable["the template"] != found[0]["the template"]


def environment_at(url: str | None, tokenizer, max_obs_length=500, topk=1, deadline_s=60.0) -> SearchEnvironment:
    client = RetrievalClient(url, topk=topk, deadline_s=deadline_s) if url else None
    return SearchEnvironment(Searcher(client, topk) if client else None, tokenizer, max_obs_length, FEEDBACK)


def step(environment: SearchEnvironment, text: str, tools_allowed: bool = True) -> Outcome:
    async def once() -> Outcome:
        try:
            return await environment.step(Prompt((1,), "test", {}), text, tools_allowed)
        finally:
            await environment.close()

    return asyncio.run(once())


def play(environment: SearchEnvironment, tokenizer, lines: list[str], gold="Sael") -> Trajectory:
    async def once() -> Trajectory:
        row = {"reward_model": {"ground_truth": {"target": [gold]}}}
        prompt = Prompt(encode_text(tokenizer, "For example, <answer> Beijing </answer>. Question: ?\n"), "test", row)
        try:
            script = Script([encode_text(tokenizer, line) for line in lines])
            return await run_episode(prompt, "g", script, environment, tokenizer, Sampling(), LIMITS, 0)
        finally:
            await environment.close()

    return asyncio.run(once())


def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}/retrieve"


def test_two_hops_to_the_answer(search_url, byte_tokenizer):
    lines = [
        "<think>a river</think><search> Ildra river </search>",
        "<search> Vonmark city </search>\n",
        "<answer> the Sael. </answer><|endoftext|>",
    ]
    trajectory = play(environment_at(search_url, byte_tokenizer), byte_tokenizer, lines)
    assert trajectory.status is Status.ANSWERED
    assert [event.get("document_ids") for event in trajectory.events] == [["river"], ["city"], None]
    assert trajectory.events[0]["query"] == "Ildra river" and trajectory.events[0]["milliseconds"] > 0
    assert trajectory.events[2]["answer"] == "the Sael."
    assert (trajectory.num_searches, trajectory.num_valid_actions) == (2, 3)
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0
    text = decode_turn(byte_tokenizer, trajectory.ids)
    assert '</search>\n\n<information>Doc 1(Title: "Ildra") The Ildra is a river.' in text
    observed = [seg.ids for seg in trajectory.segments if seg.source == "environment"]
    assert observed[0] == encode_text(byte_tokenizer, trajectory.events[0]["observation"])


def test_a_retrieved_answer_is_not_the_policys(search_url, byte_tokenizer):
    lines = ["<search> trap text says </search>", "hm", "hm", "hm"]
    trajectory = play(environment_at(search_url, byte_tokenizer), byte_tokenizer, lines, gold="Sael")
    assert trajectory.events[0]["document_ids"] == ["hostile"]
    assert trajectory.status is Status.TURN_LIMIT
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == (0.0, {"exact_match": 0.0, "has_answer": 0.0})
    assert byte_tokenizer.eos_token_id not in trajectory.ids


def test_ids_of_documents_that_were_left_out_are_not_reported(search_url, byte_tokenizer):
    environment = environment_at(search_url, byte_tokenizer, max_obs_length=150, topk=3)
    outcome = step(environment, "<search> Vonmark city mayor river winter </search>")
    assert outcome.event["num_found"] == 3
    assert len(outcome.event["document_ids"]) == outcome.event["observation"].count("Doc ") < 3
    assert len(outcome.event["scores"]) == len(outcome.event["document_ids"])


def test_scores_are_those_of_the_engine(byte_tokenizer):
    """A score that is no number is none; an engine may give none at all."""
    found = [{"contents": "A\na", "score": 2.5}, {"contents": "B\nb", "score": "high"}, {"contents": "C\nc"}]
    engine = type("Engine", (), {"search": lambda self, query: found})()
    environment = SearchEnvironment(Searcher(engine, topk=3), byte_tokenizer, 200, "Search or answer.")
    assert step(environment, "<search>q</search>").event["scores"] == [2.5, None, None]


def test_invalid_turn_gets_the_feedback(search_url, byte_tokenizer):
    environment = environment_at(search_url, byte_tokenizer)
    outcome = step(environment, "<search> </search>")
    assert (outcome.action, outcome.valid, outcome.done) == ("invalid", False, False)
    assert outcome.reply == f"\n{FEEDBACK}\n"
    assert step(environment, "no tags", tools_allowed=False).reply == ""


def test_last_turn_does_not_search(byte_tokenizer):
    outcome = step(environment_at(dead_url(), byte_tokenizer), "<search> a </search>", tools_allowed=False)
    assert (outcome.action, outcome.valid, outcome.done, outcome.reply) == ("search", True, False, "")


def test_without_search_there_is_no_tool(byte_tokenizer):
    environment = environment_at(None, byte_tokenizer)
    assert environment.stop_strings == ("</answer>",)
    assert step(environment, "<search> a </search>").action == "invalid"
    asyncio.run(environment.check())


def test_no_server_fails_the_episode(byte_tokenizer):
    url = dead_url()
    environment = environment_at(url, byte_tokenizer, deadline_s=0.5)
    trajectory = play(environment, byte_tokenizer, ["<search> a </search>", "<answer> Sael </answer>"])
    assert trajectory.status is Status.FAILED
    assert url in (trajectory.failure or "")
    assert len(trajectory.segments) == 2  # prompt and the policy's turn: the failure is no text for the policy


def test_a_query_that_cannot_be_searched_fails_its_episode_alone(poisoned_url, byte_tokenizer):
    """Episodes of one client at once, whose searches travel together."""
    environment = environment_at(poisoned_url, byte_tokenizer)
    limits = EpisodeLimits(max_turns=1, max_response_length=128, max_context_length=2000)

    async def episode(query: str) -> Trajectory:
        prompt = Prompt(encode_text(byte_tokenizer, "Question: ?\n"), "test", {})
        turns = (f"<search> {query} </search>", "<answer> Sael </answer>")
        script = Script([encode_text(byte_tokenizer, turn) for turn in turns])
        return await run_episode(prompt, "g", script, environment, byte_tokenizer, Sampling(), limits, 0)

    async def all_at_once() -> list[Trajectory]:
        try:
            return await asyncio.gather(*map(episode, ["Ildra river", "poison", "Vonmark city", "Sael"]))
        finally:
            await environment.close()

    trajectories = asyncio.run(all_at_once())
    assert [t.status is Status.FAILED for t in trajectories] == [False, True, False, False]
    failed = trajectories.pop(1)
    assert "RuntimeError: a poisoned query" in (failed.failure or "")
    assert [segment.source for segment in failed.segments] == [
        "prompt",
        "policy",
    ]  # nothing of it is shown to the policy
    assert all(t.status is Status.ANSWERED and t.num_searches == 1 for t in trajectories)


def test_check_names_the_address_and_the_command(search_url, byte_tokenizer):
    url = dead_url()
    with pytest.raises(EnvironmentUnavailable, match="retrieval_launch.sh") as caught:
        asyncio.run(environment_at(url, byte_tokenizer, deadline_s=0.5).check())
    assert url in str(caught.value)

    async def check_and_close() -> None:
        environment = environment_at(search_url, byte_tokenizer)
        await environment.check()
        await environment.close()

    asyncio.run(check_and_close())


def test_a_wrong_path_is_told_from_a_server_that_is_not_there(search_url, byte_tokenizer):
    with pytest.raises(EnvironmentUnavailable, match="not at this path; the address must end in /retrieve") as caught:
        asyncio.run(environment_at(search_url.removesuffix("/retrieve"), byte_tokenizer).check())
    assert "start one" not in str(caught.value)
    with pytest.raises(ValueError, match="is not an address: write http://"):
        environment_at("localhost:8000/retrieve", byte_tokenizer)


def test_settings_that_cannot_work(byte_tokenizer):
    with pytest.raises(ConfigError, match="max_obs_length=5"):
        environment_at(None, byte_tokenizer, max_obs_length=5)
    with pytest.raises(ConfigError, match="tag"):
        SearchEnvironment(None, byte_tokenizer, 500, "use <search> please")


def test_from_config(byte_tokenizer):
    with_search = SearchEnvironment.from_config(run_config(), byte_tokenizer)
    assert with_search.stop_strings == ("</search>", "</answer>")
    feedback = step(with_search, "no tags").reply
    assert feedback == f"\n{run_config().agent.feedback.strip()}\n"
    without = SearchEnvironment.from_config(run_config(["do_search=false"]), byte_tokenizer)
    assert without.stop_strings == ("</answer>",)
    assert EpisodeLimits.from_config(run_config(["do_search=false"])).max_turns == 0
    limits = EpisodeLimits.from_config(run_config(["max_turns=4", "data.max_prompt_length=4096"]))
    assert (limits.max_turns, limits.max_context_length, limits.window) == (4, 4096, 4096 + 512)
