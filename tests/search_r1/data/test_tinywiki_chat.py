"""TinyWiki's chat mode: a tokenizer whose format a run reads, and demonstrations that are what a run would have."""

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import bm25s
import pyarrow.parquet as pq
import pytest
from scripted_policy import Script
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from search_r1.data.tinywiki import build
from search_r1.data.tinywiki.__main__ import main
from search_r1.data.tinywiki.build import CHAT_RECIPE, worlds_of
from search_r1.data.tinywiki.chat import ChatDemonstrator
from search_r1.data.tinywiki.demonstrator import Habits, PassageIndex, Segment
from search_r1.data.tinywiki.questions import (
    TOOL_KINDS,
    UNKNOWN,
    Question,
    distinct_questions,
    make_question,
)
from search_r1.data.tinywiki.world import WORDS, World
from search_r1.evaluation.example_question import example_question
from search_r1.tools.environment import ChatSearchEnvironment
from verl.agent.environment import Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.formats import format_of
from verl.agent.formats.chat import ChatML
from verl.agent.text import decode_ids, encode_text
from verl.config import load_config
from verl.data.sft_rows import read_rows
from verl.protocol import Prompt, Status, Trajectory

SIZES = ["--num_passages", "600", "--num_test", "60", "--num_train", "60", "--num_sft_rows", "2500"]
ANSWER = re.compile(r"<answer> ?(.+?) ?</answer>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    with mock.patch.object(build, "CHAT_RECIPE", replace(CHAT_RECIPE, num_sft_passages=3000)):
        assert main(["--output_dir", str(path), "--chat", *SIZES]) == 0
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder / "policy_init")


@pytest.fixture(scope="module")
def world() -> World:
    """One whose passages are in the corpus of `folder`."""
    return worlds_of(replace(CHAT_RECIPE, num_passages=600, num_sft_passages=3000))["train"]


@pytest.fixture(scope="module")
def index(world: World) -> PassageIndex:
    return PassageIndex([world])


def demonstrated(
    world: World,
    index: PassageIndex,
    tokenizer: PreTrainedTokenizerBase,
    habits: Habits,
    kind: int | str,
    count: int,
) -> list[tuple[Question, list[Segment]]]:
    demonstrator = ChatDemonstrator(index, CHAT_RECIPE.template, habits, tokenizer)
    rng = random.Random(1)
    questions = [make_question(world, kind, rng) for _ in range(count)]
    return [(question, demonstrator.write(question, rng)) for question in questions]


def calls_of(played: Trajectory) -> list[dict[str, Any]]:
    return [call for event in played.events for call in event["calls"]]


def answer_of(segments: list[Segment]) -> str:
    return ANSWER.findall(segments[-1][1])[-1]


def test_the_tokenizer_has_a_format_and_prompts_are_short(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    form = format_of(tokenizer)
    assert type(form) is ChatML and tokenizer.eos_token_id in form.stop_token_ids
    for text in ["<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", *(f" {word}" for word in WORDS)]:
        assert len(encode_text(tokenizer, text)) == 1, text
    environment = ChatSearchEnvironment.from_config(load_config("tinywiki_chat"), tokenizer)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    prompts = [environment.prompt_ids(row["prompt"]) for row in rows]
    assert max(map(len, prompts)) <= 120
    assert all(f"\n{one.name}(" in decode_ids(tokenizer, prompts[0]) for one in environment.tools.tools)
    asked = example_question(folder / "train.parquet")
    assert asked in [row["question"] for row in rows]


def test_demonstrations_are_the_ids_that_a_run_would_have(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    index: PassageIndex,
    start_retriever: Callable[..., str],
) -> None:
    """Their turns are played against the real tools and a real server."""
    url = start_retriever(folder / "corpus.jsonl")
    config = load_config("tinywiki_chat", [f"retriever.url={url}"])
    habits = replace(CHAT_RECIPE.habits, start=1.0, both=0.8, calculate=0.8, open_page=0.6)
    written = [
        demonstration
        for kind in (*CHAT_RECIPE.test_hops, *TOOL_KINDS)
        for demonstration in demonstrated(world, index, tokenizer, habits, kind, 15)
    ]

    async def play_all() -> list[Trajectory]:
        environment = ChatSearchEnvironment.from_config(config, tokenizer)
        limits = EpisodeLimits(config.max_turns, config.data.max_response_length, config.data.max_prompt_length)
        played = []
        for question, segments in written:
            messages = CHAT_RECIPE.template.messages(question.text)
            prompt = Prompt(environment.prompt_ids(messages), "tinywiki", {}, messages=messages)
            script = Script([encode_text(tokenizer, text) for source, text in segments if source == "policy"])
            played.append(await run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))
        await environment.close()
        return played

    trajectories = asyncio.run(play_all())
    used = Counter(call["name"] for one in trajectories for call in calls_of(one))
    assert min(used[name] for name in config.agent.tools) >= 5
    for (question, segments), played in zip(written, trajectories, strict=True):
        assert played.status is Status.ANSWERED
        assert [(str(one.source), decode_ids(tokenizer, one.ids)) for one in played.segments] == segments
        assert [tuple(one.ids) for one in played.segments] == [encode_text(tokenizer, text) for _, text in segments]
        assert all(call["status"] == "ok" for call in calls_of(played)), question.text


def test_warm_start_rows_are_read_and_all_their_calls_can_be_run(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    environment = ChatSearchEnvironment.from_config(load_config("tinywiki_chat"), tokenizer)
    rows = read_rows(str(folder / "sft.parquet"))
    assert [row.phase for row in rows] == ["lm"] * 550 + ["policy"] * 1950
    for row in rows[550:850]:
        turns = [text for source, text in zip(row.sources, row.texts, strict=True) if source == "policy"]
        parsed = [environment.format.parse(encode_text(tokenizer, text), environment.schemas) for text in turns]
        assert all(turn.calls for turn in parsed[:-1]) and not parsed[-1].calls
        assert {call.status for turn in parsed for call in turn.calls} == {"ok"}
        assert ANSWER.search(parsed[-1].content)


def test_it_often_answers_one_hop_and_seldom_two(
    world: World, index: PassageIndex, tokenizer: PreTrainedTokenizerBase
) -> None:
    rates = {}
    for hops in (1, 2):
        episodes = demonstrated(world, index, tokenizer, Habits(), hops, 200)
        rates[hops] = sum(answer_of(segments) in question.targets for question, segments in episodes) / len(episodes)
    assert 0.5 < rates[1] < 0.8 and 0.1 < rates[2] < 0.3
    for question, segments in demonstrated(world, index, tokenizer, PERFECT, 2, 50):
        assert answer_of(segments) in question.targets


PERFECT = Habits(start=1.0, stop=0.0, next_hop=1.0, both=1.0, calculate=1.0)


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_the_right_choice_is_among_those_it_takes_by_chance(
    kind: str, world: World, index: PassageIndex, tokenizer: PreTrainedTokenizerBase
) -> None:
    """It is mostly wrong, and right with the habits that reinforcement learning has to find."""
    episodes = demonstrated(world, index, tokenizer, Habits(), kind, 200)
    right = sum(answer_of(segments) in question.targets for question, segments in episodes) / len(episodes)
    assert 0.1 < right < 0.5
    better = replace(PERFECT, open_page=float(kind == "page"), unknown=float(kind == "unanswerable"))
    for question, segments in demonstrated(world, index, tokenizer, better, kind, 30):
        assert answer_of(segments) in question.targets, segments
        turns = [text for source, text in segments if source == "policy"]
        if kind in ("comparison", "arithmetic"):
            assert turns[0].count("<tool_call>") == 2


def test_what_makes_a_kind_of_question(world: World) -> None:
    """Worked out from the passages alone."""
    drawn = defaultdict(list)
    for question in distinct_questions(world, TOOL_KINDS, 200):
        drawn[question.name].append(question)
    assert {name: len(questions) for name, questions in drawn.items()} == dict.fromkeys(TOOL_KINDS, 50)
    texts = {world.title(entity): (world.text(entity), world.second_text(entity)) for entity in range(300)}
    for question in drawn["page"]:
        [title], [gold] = question.chain, question.targets[:1]
        first, second = texts[title]
        assert gold not in first and gold in second and title not in second
    for question in drawn["unanswerable"]:
        [title] = question.chain
        relation = question.text.split(" is the ")[1].split(" of ")[0]
        assert question.targets == [UNKNOWN] and not any(f" {relation} " in text for text in texts[title])
    for question in (*drawn["comparison"], *drawn["arithmetic"]):
        first, second = (int(texts[title][0].rpartition("dated ")[2].rstrip(".")) for title in question.chain)
        older = question.chain[0] if first < second else question.chain[1]
        assert question.targets[0] == (older if question.name == "comparison" else str(abs(first - second)))


def test_an_article_is_a_page_and_a_search_for_its_title_finds_the_first_passage(folder: Path, world: World) -> None:
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1200 and len({row["id"] for row in rows}) == 1200
    texts = [row["contents"] for row in rows]
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    titles = [world.title(entity) for entity in range(200)]
    found, _ = retriever.retrieve(bm25s.tokenize(titles, show_progress=False), k=1, show_progress=False)
    assert [rows[row[0]]["id"] for row in found] == titles


def test_kinds_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num_passages", "600", "--num_test", "40", "--num_train", "8", "--num_sft_rows", "20"]
    with mock.patch.object(build, "CHAT_RECIPE", replace(CHAT_RECIPE, num_sft_passages=200)):
        assert main(["--output_dir", str(tmp_path), "--chat", "--kinds", "page,arithmetic", *sizes]) == 0
    sources = Counter(pq.read_table(tmp_path / "test.parquet")["data_source"].to_pylist())
    assert sources == dict.fromkeys([f"tinywiki_{name}" for name in ("1hop", "2hop", "page", "arithmetic")], 10)
    for wrong, message in ((["--chat", "--kinds", "pages"], "not a list of kinds"), (["--kinds", "page"], "--chat")):
        with pytest.raises(SystemExit):
            main(["--output_dir", str(tmp_path), *wrong])
        assert message in capsys.readouterr().err


def test_three_hops_and_tools_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output_dir", str(tmp_path), "--chat", "--long"])
    assert "--long, --marathon and --chat are different questions" in capsys.readouterr().err
