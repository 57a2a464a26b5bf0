"""The format: which turns keep it, and what is said about those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.llm_agent.transcript import Reply, Turn
from search_r1.rewards.format_reward import check_format

OPENING = ["<think>", "<search>", "<information>", "<answer>"]
ALL_TAGS = [*OPENING, "</think>", "</search>", "</information>", "</answer>"]
QUERY = "<think>a</think><search>q</search>"
SEARCH = Turn(QUERY, Reply.OBSERVATION)
ANSWER = Turn("<think>b</think><answer>c</answer>")


@pytest.mark.parametrize(
    "turns",
    [
        [ANSWER],
        [SEARCH, ANSWER],
        [SEARCH, SEARCH, SEARCH, ANSWER],
        [Turn("\n <think> a\n\nb </think>\t\n<answer> c </answer>\n\n")],
        [Turn("<think></think><answer></answer>")],
        [Turn("<think>1 < 2, <b>bold</b>, </thinking>, an observation</think><answer><i>c</i></answer>")],
    ],
)
def test_valid(turns):
    verdict = check_format(turns)
    assert (verdict.valid, verdict.reason) == (True, "")


@pytest.mark.parametrize(
    ("turns", "found", "expected"),
    [
        ([], "the trajectory ends", "<think>"),
        ([Turn("")], "turn 0: the end of the turn", "<think>"),
        ([Turn("<answer>c</answer>")], "turn 0: <answer>", "<think>"),
        ([SEARCH, Turn("<answer>c</answer>")], "turn 1: <answer>", "<think>"),
        ([Turn("Well. <think>a</think>")], "turn 0: the text 'Well.'", "<think>"),
        ([Turn("<think>a</think> so <answer>c</answer>")], "turn 0: the text 'so'", "<search> or <answer>"),
        ([Turn("<think>a</think><answer>c</answer>.")], "turn 0: the text '.'", "the end of the turn"),
        ([Turn("<think>a<answer>c</answer>")], "turn 0: <answer>", "</think>"),
        ([Turn("<think>a<think>b</think></think>")], "turn 0: <think>", "</think>"),
        ([Turn("<think>a</think><search>q<answer>c</answer>")], "turn 0: <answer>", "</search>"),
        ([Turn("<think>a</think>")], "turn 0: the end of the turn", "<search> or <answer>"),
        ([Turn("<think>a</think><answer>c")], "turn 0: the end of the turn", "</answer>"),
        ([Turn("<think>a</think></answer>c<answer>")], "turn 0: </answer>", "<search> or <answer>"),
        ([Turn("<think>a</think><think>b</think><answer>c</answer>")], "turn 0: <think>", "<search> or <answer>"),
        # The policy writes the reply itself: in one breath with its query, and inside a thought.
        ([Turn(QUERY + "<information>p</information>", Reply.OBSERVATION)], "turn 0: <information>", "an observation"),
        ([Turn("<think>a<information>p</information></think>")], "turn 0: <information>", "</think>"),
        (
            [Turn(QUERY + "an observation", Reply.OBSERVATION), ANSWER],
            "turn 0: the text 'an observation'",
            "an observation",
        ),
        # Replies.
        ([SEARCH], "the trajectory ends", "<think>"),
        ([Turn(QUERY)], "turn 0: the end of the turn", "an observation"),
        ([Turn(QUERY, Reply.FEEDBACK), ANSWER], "turn 0: feedback of the environment", "an observation"),
        ([Turn("", Reply.FEEDBACK), ANSWER], "turn 0: feedback of the environment", "<think>"),
        ([Turn("<think>a</think><search>q", Reply.OBSERVATION), ANSWER], "turn 0: an observation", "</search>"),
        (
            [Turn("<think>a</think><answer>c</answer>", Reply.OBSERVATION), ANSWER],
            "turn 0: an observation",
            "the end of the turn",
        ),
        # A block does not reach across turns, and nothing comes after the answer.
        ([Turn("<think>a"), Turn("</think><answer>c</answer>")], "turn 0: the end of the turn", "</think>"),
        ([ANSWER, ANSWER], "turn 1: <think>", "nothing"),
        ([ANSWER, Turn(" ")], "turn 1: the end of the turn", "nothing"),
    ],
)
def test_invalid_says_what_came_first_and_where(turns, found, expected):
    verdict = check_format(turns)
    assert (verdict.valid, verdict.reason) == (False, f"{found} where {expected} should stand")


def test_a_reason_quotes_no_more_than_the_start_of_a_long_text():
    verdict = check_format([Turn("x" * 41 + "<think>a</think><answer>c</answer>")])
    assert verdict.reason == f"turn 0: the text '{'x' * 40}' where <think> should stand"


space = st.text(alphabet=" \n\t", max_size=3)
# Halves of tags are likely in this alphabet; whole ones are taken out.
words = st.lists(st.sampled_from(["<", ">", "/", "think", "search", "answer", "</", "Rome", " ", "\n"])).map("".join)
inside = words.filter(lambda text: not any(tag in text for tag in ALL_TAGS))


@st.composite
def blocks(draw, name: str) -> list[str]:
    """One turn in pieces: white space, tags and text, so that a tag can be taken out by its position."""
    middle = ["<think>", draw(inside), "</think>", draw(space), f"<{name}>", draw(inside), f"</{name}>"]
    return [draw(space), *middle, draw(space)]


@st.composite
def trajectories(draw) -> list[list[str]]:
    return [*draw(st.lists(blocks("search"), max_size=3)), draw(blocks("answer"))]


def turns_of(pieces: list[list[str]]) -> list[Turn]:
    replies = [Reply.OBSERVATION] * (len(pieces) - 1) + [Reply.NONE]
    return [Turn("".join(parts), reply) for parts, reply in zip(pieces, replies, strict=True)]


@given(trajectories())
def test_everything_the_grammar_makes_is_valid(pieces):
    assert check_format(turns_of(pieces)).valid


@given(trajectories(), st.data())
def test_without_any_one_tag_it_is_invalid(pieces, data):
    parts = data.draw(st.sampled_from(pieces))
    where = data.draw(st.sampled_from([index for index, part in enumerate(parts) if part in ALL_TAGS]))
    parts[where] = ""
    assert not check_format(turns_of(pieces)).valid


@given(trajectories(), st.data(), st.sampled_from(ALL_TAGS))
def test_with_any_one_tag_more_it_is_invalid(pieces, data, stray):
    turns = turns_of(pieces)
    number = data.draw(st.integers(0, len(turns) - 1))
    text = turns[number].text
    where = data.draw(st.integers(0, len(text)))
    turns[number] = Turn(text[:where] + stray + text[where:], turns[number].reply)
    assert not check_format(turns).valid


@given(trajectories(), st.data(), st.sampled_from(list(Reply)))
def test_with_any_other_reply_it_is_invalid(pieces, data, reply):
    turns = turns_of(pieces)
    number = data.draw(st.integers(0, len(turns) - 1))
    same = turns[number].reply is reply
    turns[number] = Turn(turns[number].text, reply)
    assert check_format(turns).valid == same
