"""Which part of an episode a word belongs to, said while it is being written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.llm_agent.grammar import Grammar
from search_r1.serve.parts import Part, TurnSplitter, merged

GRAMMAR = Grammar()


def split(text: str, pieces: list[str] | None = None, grammar: Grammar = GRAMMAR) -> list[tuple[str, str]]:
    splitter = TurnSplitter(grammar)
    parts = [part for piece in pieces or [text] for part in splitter.feed(piece)]
    answers = grammar.parse_action(text).kind == "answer"
    parts += splitter.end_with_answer() if answers else splitter.end()
    return [(part.kind, part.text) for part in merged(parts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("<think>a</think>b<search>", [("think", "<think>a</think>"), ("text", "b"), ("search", "<search>")]),
        ("so <answer> x </answer>", [("text", "so "), ("answer", "<answer> x </answer>")]),
        # a query or an answer begins inside a thought that nobody closed
        ("<think>a<search>c</search>", [("think", "<think>a"), ("search", "<search>c</search>")]),
        ("<think>a<answer>x</answer>", [("think", "<think>a"), ("answer", "<answer>x</answer>")]),
        # what the grammar reads as one query is one part
        ("<search>a<think>b</search>", [("search", "<search>a<think>b</search>")]),
        # an answer tag without its end makes no answer
        ("<think>no <answer> yet</think>", [("think", "<think>no <answer> yet</think>")]),
        ("<answer>a<search>b</search>", [("text", "<answer>a"), ("search", "<search>b</search>")]),
        ("<answer>never closed", [("text", "<answer>never closed")]),
        ("<search>a<answer>b</search>", [("search", "<search>a<answer>b</search>")]),
        ("a</think>b<thin", [("text", "a</think>b<thin")]),
    ],
)  # fmt: skip
def test_kinds(text: str, expected: list[tuple[str, str]]) -> None:
    assert split(text) == expected


def test_a_grammar_without_search_and_with_other_names() -> None:
    grammar = Grammar(think="plan", search=None)
    text = "<plan>a<search>b</search></plan><answer>x</answer>"
    assert split(text, grammar=grammar) == [
        ("think", "<plan>a<search>b</search></plan>"),
        ("answer", "<answer>x</answer>"),
    ]


def test_words_are_told_at_once_and_tags_when_they_are_certain() -> None:
    splitter = TurnSplitter(GRAMMAR)
    pieces = ["<thi", "nk>the ri", "ver </thi", "s", "</think>", "<answer> x", " </answer>"]
    assert [splitter.feed(piece) for piece in pieces] == [
        [],
        [Part("think", "<think>the ri")],
        [Part("think", "ver ")],
        [Part("think", "</this")],
        [Part("think", "</think>")],
        [],
        [],
    ]
    assert splitter.end_with_answer() == [Part("answer", "<answer> x </answer>")]


fragments = st.sampled_from([*GRAMMAR.tags, "<", "</", "answer>", "a", " \u6cb3", "\n"])


@given(text=st.lists(fragments, max_size=12).map("".join), cuts=st.lists(st.integers(0, 80), max_size=12))
def test_parts_add_up_and_do_not_depend_on_how_the_text_came(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = split(text, [text[i:j] for i, j in zip(places, places[1:], strict=False)])
    assert "".join(text for _, text in parts) == text
    assert parts == split(text, list(text)) == split(text)
    assert ("answer" in dict(parts)) == (GRAMMAR.parse_action(text).kind == "answer")
