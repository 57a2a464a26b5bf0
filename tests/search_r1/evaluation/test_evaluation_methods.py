"""The baselines' loops: a sampler that says what it is told, a real retrieval server, the trainer's episode code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from evaluation_world import PASSAGES, QUESTION
from run_config import run_config

from search_r1.evaluation.command_line import METHODS, check_template, overrides_of
from search_r1.evaluation.methods import make_method
from search_r1.evaluation.questions import Question
from search_r1.evaluation.store import Measurer, Record, Scored
from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.search_engine import Searcher
from search_r1.llm_agent.templates import load_template
from verl.agent.environment import Generation, Sampling, make_environment
from verl.agent.episode import EpisodeLimits
from verl.agent.text import encode_text
from verl.config import Config
from verl.errors import ConfigError, DataError
from verl.protocol import Status, Trajectory

SAEL = Question("nq", "q1", ("Sael",), QUESTION)
GREEDY = Sampling(temperature=0.0)


class Script:
    """Says the next line of a script, cut at the first stop string, and remembers what it was shown."""

    def __init__(self, tokenizer, *lines: str) -> None:
        self.tokenizer, self.lines = tokenizer, list(lines)
        self.contexts: list[str] = []
        self.stops: list[tuple[str, ...]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        self.contexts.append(self.tokenizer.decode(ids))
        self.stops.append(sampling.stop)
        line = self.lines.pop(0)
        with suppress(ValueError):
            line = line[: min(line.index(stop) + len(stop) for stop in sampling.stop if stop in line)]
        ids = encode_text(self.tokenizer, line)
        return Generation(ids, (-0.1,) * len(ids), "stop")


def config_of(method: str, url: str, *further: str) -> Config:
    settings = (
        f"retriever.url={url}",
        "retriever.topk=1",
        "max_turns=2",
        "data.max_obs_length=200",
        "data.max_prompt_length=4096",
    )
    return run_config([*settings, *overrides_of(method, None), *further])


def play(
    method: str, url: str, tokenizer, *lines: str, question: Question = SAEL, further: Sequence[str] = ()
) -> tuple[Script, Trajectory, Record]:
    config, script = config_of(method, url, *further), Script(tokenizer, *lines)
    check_template(method, config)
    template = load_template(config.agent.template)

    async def run() -> tuple[Trajectory, Record]:
        environment = make_environment(config, tokenizer)
        agent = SearchAgent(script, environment, tokenizer, template, EpisodeLimits.from_config(config), GREEDY)
        searcher = Searcher.from_config(config.retriever) if METHODS[method].needs_context else None
        try:
            trajectory = await make_method(method, agent, config, searcher, own_prompts=True).play(question)
        finally:
            await environment.close()
            if searcher is not None:
                await searcher.close()
        measurer = Measurer(tokenizer, template.grammar, METHODS[method].retrieves)
        [record] = measurer.measure([Scored(trajectory, 1.5)])
        return trajectory, record

    trajectory, record = asyncio.run(run())
    assert not script.lines or trajectory.status is Status.FAILED
    return script, trajectory, record


def test_ircot_looks_up_each_thought_and_then_answers(retriever_url, byte_tokenizer):
    thought = "<think> The country of the city Vonmark is needed. </think>"
    script, trajectory, record = play(
        "ircot", retriever_url, byte_tokenizer, thought + " and more", "<answer> Sael </answer>"
    )
    assert PASSAGES["river"].split("\n")[1] in script.contexts[0]
    found = f"\n\n<information>Doc 1(Title: {PASSAGES['city'].split(chr(10))[0]}) {PASSAGES['city'].split(chr(10))[1]}"
    assert script.contexts[1] == script.contexts[0] + thought + found + "</information>\n\n"
    assert trajectory.status is Status.ANSWERED
    assert trajectory.events[0]["query"] == "The country of the city Vonmark is needed."
    assert trajectory.events[0]["document_ids"] == ["city"]
    assert script.stops == [("</think>", "</answer>")] * 2
    assert record.answer == "Sael" and record.metrics["em"] == 1
    assert record.metrics["searches"] == 2 and record.metrics["retrieval_recall"] == 1


def test_ircot_after_its_last_step_is_not_interrupted_before_the_answer(retriever_url, byte_tokenizer):
    last = "<think> The city is in Sael. </think><answer> Sael </answer>"
    thoughts = ("<think> the river </think>", "<think> the city Vonmark </think>")
    script, trajectory, record = play("ircot", retriever_url, byte_tokenizer, *thoughts, last)
    assert script.stops == [("</think>", "</answer>")] * 2 + [("</answer>",)]
    assert trajectory.status is Status.ANSWERED and record.answer == "Sael"
    assert record.metrics["searches"] == 3 and trajectory.num_turns == 3


def test_ircot_without_a_thought_is_told_so_and_it_costs_a_step(retriever_url, byte_tokenizer):
    script, trajectory, record = play("ircot", retriever_url, byte_tokenizer, "hm", "<think>  </think>", "no answer")
    assert script.contexts[1].endswith("between answer tags.\n")
    assert trajectory.status is Status.TURN_LIMIT and record.answer is None
    assert record.metrics["invalid_actions"] == 3 and record.metrics["em"] == record.metrics["finished"] == 0


def test_episodes_of_ircot_count_their_steps_apart(retriever_url, byte_tokenizer):
    config = config_of("ircot", retriever_url)

    async def run() -> list[Trajectory]:
        searcher = Searcher.from_config(config.retriever)
        template, limits = load_template("ircot"), EpisodeLimits.from_config(config)
        lines = ["<think> the river </think>"] * 4 + ["<answer> Sael </answer>"] * 2
        script = Script(byte_tokenizer, *lines)
        environment = make_environment(config, byte_tokenizer)  # ircot plays in one of its own
        agent = SearchAgent(script, environment, byte_tokenizer, template, limits, GREEDY)
        method = make_method("ircot", agent, config, searcher, own_prompts=False)
        try:
            return await asyncio.gather(method.play(SAEL), method.play(SAEL))
        finally:
            await searcher.close()
            await environment.close()

    assert [trajectory.status for trajectory in asyncio.run(run())] == [Status.ANSWERED] * 2


def test_rag_shows_the_passages_of_the_question_and_asks_once(retriever_url, byte_tokenizer):
    script, trajectory, record = play("rag", retriever_url, byte_tokenizer, "<answer> Vonmark </answer>")
    assert 'Context: Doc 1(Title: "Ildra") The Ildra is a river.' in script.contexts[0]
    assert script.stops == [("</answer>",)] and trajectory.num_turns == 1
    assert record.metrics["searches"] == 1 and record.metrics["retrieval_recall"] == 0
    assert record.metrics["em"] == 0 and record.metrics["finished"] == 1
    there = Question("nq", "q1", ("the Vonmark",), QUESTION)
    assert play("rag", retriever_url, byte_tokenizer, "x", question=there)[2].metrics["retrieval_recall"] == 1


def test_a_passage_cannot_answer_for_the_model(retriever_url, byte_tokenizer):
    question = Question("nq", "q2", ("Sael",), "What does the trap say?")
    script, _, record = play("rag", retriever_url, byte_tokenizer, "nothing", question=question)
    assert "This trap says" in script.contexts[0] and "<answer> Sael" not in script.contexts[0]
    assert record.answer is None


@pytest.mark.parametrize(("method", "tag"), [("direct", "<think>"), ("cot", "<search>")])
def test_methods_without_a_retriever_ask_none(method, tag, byte_tokenizer):
    script, trajectory, record = play(method, "http://127.0.0.1:9/none", byte_tokenizer, "<answer> in sael! </answer>")
    assert tag not in script.contexts[0] and script.contexts[0].endswith(f"Question: {QUESTION}\n")
    assert trajectory.status is Status.ANSWERED and record.metrics["retrieval_recall"] is None
    metrics = record.metrics
    assert (metrics["em"], metrics["f1"], metrics["cover_em"]) == (0, pytest.approx(2 / 3), 1)
    assert metrics["searches"] == 0 and metrics["latency_s"] == 1.5
    assert metrics["policy_tokens"] == len(encode_text(byte_tokenizer, "<answer> in sael! </answer>"))
    assert metrics["total_tokens"] == metrics["policy_tokens"] + len(trajectory.prompt.ids)


def test_a_prompt_file_is_asked_in_its_own_words_by_search_alone(retriever_url, byte_tokenizer):
    question = Question("nq", "q3", ("Sael",), None, "", [{"role": "user", "content": "My own words."}])
    script, _, record = play("search", retriever_url, byte_tokenizer, "<answer>Sael</answer>", question=question)
    assert script.contexts == ["My own words."] and record.metrics["em"] == 1
    assert record.question == "My own words."
    with pytest.raises(DataError, match="nq/q3.*no 'question'"):
        play("cot", retriever_url, byte_tokenizer, "x", question=question)


@pytest.mark.parametrize("method", ["search", "rag", "ircot"])
def test_a_retriever_that_is_down_makes_the_question_fail(method, byte_tokenizer):
    url = "http://127.0.0.1:9/retrieve"
    lines = ("<search> the river </search>", "more", "more")
    _, trajectory, record = play(
        method, url, byte_tokenizer, *lines, further=("retriever.timeout_s=0.2", "retriever.deadline_s=0.3")
    )
    assert trajectory.status is Status.FAILED and url in (record.failure or "")
    assert record.failed and set(record.metrics.values()) == {None}


def test_templates_have_to_fit(retriever_url):
    with pytest.raises(ConfigError, match="--method rag needs a template with {context}; r1 is none"):
        check_template("rag", config_of("rag", retriever_url, "agent.template=r1"))
    with pytest.raises(ConfigError, match="--method cot needs a template without {context}"):
        check_template("cot", config_of("cot", retriever_url, "agent.template=rag"))
