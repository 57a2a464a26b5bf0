"""Marathons: questions of 8 to 12 hops, and a demonstrator that sums up as a run does, token by token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from scripted_policy import Script

from search_r1.data.tinywiki import marathon
from search_r1.data.tinywiki.__main__ import main
from search_r1.data.tinywiki.build import (
    MARATHON_RECIPE,
    SERVED,
    sft_rows,
    train_tokenizer,
    worlds_of,
    write_corpus,
    write_prompts,
)
from search_r1.data.tinywiki.demonstrator import PassageIndex, Segment
from search_r1.data.tinywiki.marathon import REQUEST, TOPK, Lapses, MarathonDemonstrator, what_is_left
from search_r1.data.tinywiki.questions import MARATHON, ChainQuestion, make_question
from search_r1.data.tinywiki.world import World
from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.rewards.reading import evidence_of
from verl.agent.environment import Sampling
from verl.agent.episode import Compaction, EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.errors import DataError
from verl.protocol import Prompt, Source, Status

RECIPE = replace(MARATHON_RECIPE, num_sft_passages=1000, num_lm_rows=150, num_policy_rows=250)


@pytest.fixture(scope="module")
def world() -> World:
    return worlds_of(RECIPE)["sft"]


@pytest.fixture(scope="module")
def index(world: World) -> PassageIndex:
    return PassageIndex([world])


def demonstration(
    world: World, index: PassageIndex, lapses: Lapses, hops: int, seed: int = 0
) -> tuple[ChainQuestion, list[Segment]]:
    rng = random.Random(seed)
    question = make_question(world, hops, rng)
    return question, MarathonDemonstrator(index, RECIPE.template, lapses).write(question, rng)


def test_a_question_is_a_walk_of_as_many_relations(world: World) -> None:
    rng = random.Random(0)
    for hops in MARATHON:
        question = make_question(world, hops, rng)
        assert question.hops == hops and question.name == f"{hops}hop"
        assert question.path == tuple(world.follow(question.path[0], question.relations))
        assert question.text.count(" of ") == hops and question.kind == f"{hops}.{question.relations[-1]}"
    with pytest.raises(DataError, match="no questions of 7 hops"):
        make_question(world, 7, rng)


@pytest.mark.parametrize("hops", MARATHON)
def test_without_lapses_every_hop_is_taken(world: World, index: PassageIndex, hops: int) -> None:
    question, segments = demonstration(world, index, Lapses(0, 0), hops)
    searches = [text for source, text in segments if source == "policy" and "<search>" in text]
    names = [world.title(entity) for entity in question.path]
    for number, (turn, name) in enumerate(zip(searches, names, strict=False)):
        left = what_is_left(question.relations[number:], name)
        assert turn == f"<think> {left}</think><search> {name}</search>"
    assert len(searches) == hops and segments[-1] == (
        "policy",
        f"<think> {names[-1]}</think><answer> {names[-1]}</answer>",
    )
    assert names[-1] in question.targets
    # The window is never left alone for longer than two searches.
    summaries = [place for place, (_, text) in enumerate(segments) if text == f"\n\n{REQUEST}\n\n"]
    assert len(summaries) >= hops // marathon.MAX_SEARCHES_BETWEEN


def test_a_summary_that_forgets_the_question_ends_in_a_guess(world: World, index: PassageIndex) -> None:
    question, segments = demonstration(world, index, Lapses(forget=1, misread=0), 9)
    assert segments[-4][1] == segments[-2][1].partition("</summary>")[0] + "</summary>"
    name = segments[-4][1].removeprefix("<summary> ").removesuffix(" </summary>")
    assert name in segments[-5 - 1][1] and " of " not in name
    entity = next(one for one in question.path if world.title(one) == name)
    assert segments[-1][1].partition("<answer> ")[2].removesuffix("</answer>") in world.facts(entity).values()


class Shelf:
    def __init__(self, index: PassageIndex) -> None:
        self.index = index

    def search(self, query: str) -> list[Mapping[str, Any]]:
        [found] = self.index.search([query.strip()], TOPK)
        return [{"id": str(one.entity), "contents": one.contents} for one in found]


def test_the_rows_are_the_sequences_of_a_run(
    world: World, index: PassageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that says the demonstrator's turns reads what the demonstrator has written down."""
    monkeypatch.setattr(marathon, "MAX_SEARCHES_BETWEEN", 1)
    question, segments = demonstration(world, index, Lapses(0, 0), 8)
    tokenizer = train_tokenizer((text for _, text in segments), vocab_size=400)
    prompt = Prompt(encode_text(tokenizer, segments[0][1]), "test", {})
    environment = SearchEnvironment(Searcher(Shelf(index), TOPK), tokenizer, 400, "neither")
    script = Script([encode_text(tokenizer, text) for source, text in segments if source == "policy"])
    compaction = Compaction(at=len(prompt.ids), max_times=20, max_length=100, request=REQUEST)
    limits = EpisodeLimits(12, 200, 2000, compaction=compaction)
    played = asyncio.run(run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))
    assert played.status is Status.ANSWERED and played.events[-1]["answer"] in question.targets
    assert played.num_searches == 8 and len(played.sequences) == 9
    written = [encode_text(tokenizer, text) for _, text in segments]
    assert list(played.ids) == [token for ids in written for token in ids]
    trained = [source == "policy" for (source, _), ids in zip(segments, written, strict=True) for _ in ids]
    assert played.loss_mask == trained


def test_the_evidence_of_a_question_are_the_passages_on_its_way(tmp_path: Path) -> None:
    recipe = replace(RECIPE, num_train=20, num_validation=5, num_test=5)
    write_corpus([worlds_of(recipe)[name] for name in SERVED], tmp_path / "corpus.jsonl")
    write_prompts(recipe, worlds_of(recipe), tmp_path)
    passages = {row["id"]: row["contents"] for row in map(json.loads, (tmp_path / "corpus.jsonl").open())}
    for split in SERVED:
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist():
            evidence = evidence_of(row)
            titles = [passages[one].partition("\n")[0].strip('"') for one in evidence]
            assert titles == row["extra_info"]["chain"] and len(titles) == row["extra_info"]["hops"]


def test_a_row_is_a_sequence(world: World, index: PassageIndex) -> None:
    rows = list(sft_rows(RECIPE, world, MarathonDemonstrator(index, RECIPE.template, Lapses())))
    assert [row["phase"] for row in rows].count("lm") in range(150, 165) and len(rows) == 400
    for row in rows:
        sources = [segment["source"] for segment in row["segments"]]
        assert not {"prompt", "context"} & set(sources[1:])
        assert len(sources) == 1 or sources[0] in ("prompt", "context") and sources[-1] == "policy"
    assert {row["segments"][0]["source"] for row in rows} == {*map(str, (Source.PROMPT, Source.CONTEXT)), "environment"}


def test_one_mode_at_a_time(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    for other in ("--long", "--chat"):
        with pytest.raises(SystemExit):
            main(["--output_dir", str(tmp_path), "--marathon", other])
        assert "are different questions; give one of them" in capsys.readouterr().err
