"""What counts as a thought."""

from __future__ import annotations

import pytest

from search_r1.llm_agent.grammar import SEARCH_R1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> I need the city. </think><search> city </search>", True),
        ("<think></think><search> city </search>", False),
        ("<think> \n </think><answer> x </answer>", False),
        ("<search> city </search>", False),
        ("<think> never closed <answer> x </answer>", False),
        ("<think></think><think> later </think>", True),
    ],
)
def test_a_thought_is_a_think_block_with_something_in_it(text: str, expected: bool) -> None:
    assert SEARCH_R1.has_thought(text) is expected
