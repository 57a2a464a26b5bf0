"""Stripping the agent's tags in one pass is the same as removing tags until none is left."""

from __future__ import annotations

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_r1.search.sanitize import strip_agent_tags

_TAG = re.compile(r"<\s*/?\s*(?:answer|search|information|think|result)\s*/?\s*>", re.IGNORECASE)
_PIECES = ["<", "</", "< /", ">", "/>", "answer", "<answer>", "</Search>", "<inform", "ation>", "think", "ans", "wer"]
_PIECES += [" ", "x"]


def _until_none_is_left(text: str) -> str:
    removed = 1
    while removed:
        text, removed = _TAG.subn("", text)
    return text


@settings(max_examples=8 * settings.default.max_examples)
@given(text=st.lists(st.sampled_from(_PIECES), max_size=14).map("".join))
@example(text="a <answer>b</answer> c <SEARCH>x</ Search > <ans<answer>wer>Paris</answer>")
@example(text="<information><think><result>x</result></think></information>")
@example(text="<answ" * 50 + "<think>" + "er>" * 50)
@example(text="a > b <answer> c < d > e </answer")
def test_one_pass_removes_what_repeated_removal_removes(text: str) -> None:
    assert strip_agent_tags(text) == _until_none_is_left(text)


def test_what_is_no_tag_of_the_agent_stays() -> None:
    text = "1 < 2 > 0, <b>bold</b>, <answers>"
    assert strip_agent_tags(f"<answer>{text}</ Search >") == text


def test_deep_nesting_is_one_pass_too() -> None:
    depth = 20_000  # removing one level at a time would read the text 20,000 times
    assert strip_agent_tags("<answ" * depth + "<think>" + "er>" * depth) == ""
