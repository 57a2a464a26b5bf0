"""A tag that is only named in a thought opens nothing, whoever reads the turn; as published, it opens a block."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from run_config import run_config

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar, last_box
from search_r1.llm_agent.templates import load_template, shipped_templates, template_of
from search_r1.llm_agent.transcript import Reply, Turn, final_answer
from search_r1.rewards.component import make_component
from search_r1.rewards.composite import CompositeReward
from search_r1.rewards.format_reward import check_format
from search_r1.rewards.reading import Reading
from search_r1.serve.parts import Part, TurnSplitter, merged
from search_r1.viewer.runs import read_settings
from search_r1.viewer.segments import split_segment
from verl.protocol import Source, Status

PUBLISHED = Grammar(tags_in_thoughts=True)
NAMED = "<think> I will use <answer> tags and no <search> or <think> tag. </think>"
ANSWER, SEARCH = f"{NAMED}<answer> Paris </answer>", f"{NAMED}<search> France </search>"


@pytest.mark.parametrize(
    ("text", "action", "published"),
    [
        (ANSWER, ("answer", "Paris"), ("answer", "tags and no <search> or <think> tag. </think><answer> Paris")),
        (SEARCH, ("search", "France"), ("search", "or <think> tag. </think><search> France")),
        ("<think>no <answer> a </answer> b</think>", ("invalid", ""), ("answer", "a")),  # sampling stops at a pair
        ("<think> open <answer> a </answer>", ("answer", "a"), ("answer", "a")),
        ("<think> open <search> q </search>", ("search", "q"), ("search", "q")),
        ("<think>a</think><answer>x <think>y</think></answer>", ("answer", "x <think>y</think>"), None),
        ("<answer>x<think> <search> </think></answer>", ("answer", "x<think> <search> </think>"), None),
        (
            "<think>a</think><think>b<search></think><search>q</search>",
            ("search", "q"),
            ("search", "</think><search>q"),
        ),
        ("</think><answer>a</answer>", ("answer", "a"), None),
        ("<think>a<search></think>", ("invalid", ""), None),
        ("<Think>a <search> b </Think> </search>", ("search", "b </Think>"), None),
    ],
)
def test_the_action(text: str, action: tuple[str, str], published: tuple[str, str] | None) -> None:
    for grammar, expected in ((SEARCH_R1, action), (PUBLISHED, published or action)):
        found = grammar.parse_action(text)
        assert (found.kind, found.content) == expected
        if expected[0] == "answer":
            assert grammar.extract_answer(text) == expected[1] == final_answer([Turn(text)], grammar)


def _reading(grammar: Grammar, *texts: str) -> Reading:
    """An episode that searches in each turn but the last, which answers."""
    turns = [Turn(text, Reply.OBSERVATION, "France", "Its capital is Paris.") for text in texts[:-1]]
    turns.append(Turn(texts[-1]))
    answer = final_answer(turns, grammar)
    return Reading(tuple(turns), answer, ("Paris",), "where?", grammar, Status.ANSWERED)


def test_the_answer_counts_and_the_format_is_broken_as_published() -> None:
    CompositeReward({"exact_match": 1.0})  # registers the components
    for grammar, exact in ((SEARCH_R1, 1.0), (PUBLISHED, 0.0)):
        reading = _reading(grammar, SEARCH, ANSWER)
        assert make_component("exact_match")(reading) == exact
        verdict = check_format(reading.turns, grammar)
        assert not verdict.valid and verdict.reason.startswith("turn 0: <answer>")


def test_notes_named_in_a_thought_are_no_notes() -> None:
    CompositeReward({"refine_correct": 1.0})
    measure = make_component("refine_correct")
    episode = ("<think>Paris? I will <refine>.</think><refine> Rome </refine>", "<answer> Paris </answer>")
    assert measure(_reading(SEARCH_R1, *episode)) == 0.0
    noted = ("<think>I will <refine> Rome.</think><refine> Paris </refine>", "<answer> Paris </answer>")
    assert measure(_reading(SEARCH_R1, *noted)) == measure(_reading(PUBLISHED, *noted)) == 1.0
    inside = ("<think>I will <refine> Paris </refine></think>", "<answer> Paris </answer>")
    assert [measure(_reading(grammar, *inside)) for grammar in (SEARCH_R1, PUBLISHED)] == [0.0, 1.0]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("grammar", "text", "parts"),
    [
        (SEARCH_R1, ANSWER, [("think", NAMED), ("answer", "<answer> Paris </answer>")]),
        (SEARCH_R1, SEARCH, [("think", NAMED), ("search", "<search> France </search>")]),
        (SEARCH_R1, "<think>a <search> b", [("think", "<think>a "), ("search", "<search> b")]),
        (
            SEARCH_R1,
            "<think>a <search> b <answer>c</answer>",
            [("think", "<think>a "), ("search", "<search> b "), ("answer", "<answer>c</answer>")],
        ),
        (SEARCH_R1, "<think>a</think> x", [("think", "<think>a</think>"), ("text", " x")]),
        (PUBLISHED, "<think>a <search>b</search>", [("think", "<think>a "), ("search", "<search>b</search>")]),
        (PUBLISHED, "<think>a <search> b </think>", [("think", "<think>a "), ("search", "<search> b </think>")]),
    ],
)
def test_server_and_viewer_show_it_so(grammar: Grammar, text: str, parts: list[tuple[str, str]], size: int) -> None:
    """Also while the text arrives, in pieces of any size."""
    expected = [Part(*part) for part in parts]  # type: ignore[arg-type]
    assert split_segment(Source.POLICY, text, None, grammar) == expected
    splitter = TurnSplitter(grammar)
    arrived = [part for start in range(0, len(text), size) for part in splitter.feed(text[start : start + size])]
    is_answer = grammar.parse_action(text).kind == "answer"
    assert merged([*arrived, *(splitter.end_with_answer() if is_answer else splitter.end())]) == expected
    assert "".join(piece for piece, _ in grammar.parts(text)) == text


# --- the setting


def test_the_setting_reaches_environment_rewards_and_viewer(byte_tokenizer, tmp_path) -> None:
    for value in (False, True):
        config = run_config([f"agent.tags_in_thoughts={value}", "do_search=false"])
        assert template_of(config.agent).grammar.tags_in_thoughts is value
        assert SearchEnvironment.from_config(config, byte_tokenizer).grammar.tags_in_thoughts is value
        assert CompositeReward.from_config(config, weights={"exact_match": 1}).grammar.tags_in_thoughts is value
        (tmp_path / "config.yaml").write_text(f"agent: {{template: search_r1, tags_in_thoughts: {value}}}")
        assert read_settings(tmp_path).grammar.tags_in_thoughts is value
    assert run_config().agent.tags_in_thoughts is False


def test_the_viewer_reads_a_run_of_before_as_it_was_scored(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("agent: {template: search_r1}")
    assert read_settings(tmp_path).grammar == PUBLISHED


@pytest.mark.parametrize("name", shipped_templates())
def test_prompt_files_of_before_are_of_the_same_template(name: str) -> None:
    template = load_template(name)
    published = replace(template, grammar=replace(template.grammar, tags_in_thoughts=True))
    assert published.fingerprint == template.fingerprint and "tags_in_thoughts" not in repr(published.grammar)


# --- time


LONG = 200_000


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * (LONG // 7), "{" * LONG, r"\boxed{" * 9 + "}{" * (LONG // 2), r"\boxed{}" * (LONG // 8)],
    ids=["boxes", "braces", "both", "closed"],
)
def test_the_last_box_takes_time_in_proportion_to_the_text(text: str) -> None:
    started = time.process_time()
    last_box(text)
    assert time.process_time() - started < 2  # in quadratic time: minutes


@pytest.mark.parametrize("piece", ["<think>", "<answer>", "<search>", "<think><answer>", "<think></think>"])
def test_tags_take_time_in_proportion_to_the_text(piece: str) -> None:
    text = piece * (LONG // len(piece))
    CompositeReward({"refine_format": 1.0})
    names = [
        "valid_format",
        "research_format",
        "r1_searcher_violation",
        "refine_format",
        "refine_correct",
        "long_think",
    ]
    measures = [make_component(name) for name in names]
    started = time.process_time()
    for grammar in (SEARCH_R1, replace(PUBLISHED, boxed=True)):
        grammar.parse_action(text), grammar.extract_answer(text), grammar.thoughts(text), list(grammar.parts(text))
        for measure in measures:
            measure(_reading(grammar, text))
    assert time.process_time() - started < 10
