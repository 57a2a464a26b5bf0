"""Exact match: only the policy's own words count."""

from __future__ import annotations

import pytest
from reward_episodes import FEEDBACK, written

from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.rewards.normalize import normalize_answer
from search_r1.rewards.reading import read_trajectory
from verl.errors import DataError


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("  The  Beatles ", "beatles"),
        ("A-b, c!", "ab c"),
        ("an apple a day", "apple day"),
        ("Anthem", "anthem"),
        ("theatre", "theatre"),
        ("\u00c9mile Zola", "\u00e9mile zola"),
        ("\u201cquoted\u201d", "\u201cquoted\u201d"),  # punctuation outside ASCII stays
        ("\u5317\u4eac", "\u5317\u4eac"),
        ("U.S.", "us"),
        ("line\n\ttwo", "line two"),
        ("The", ""),
        ("", ""),
    ],
)
def test_normalize(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>a</answer> no, <answer>b</answer>", "b"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>a</answer><answer>open", "a"),
        ("<answer></answer>", ""),
        ("<answer>open", None),
        ("none", None),
        ("<Answer>a</Answer>", None),
    ],
)
def test_extract_answer(text, answer):
    assert SEARCH_R1.extract_answer(text) == answer


def test_beijing_in_the_prompt_is_not_an_answer(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["Beijing"], ("I do not know.<|endoftext|>", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == (0.0, {"exact_match": 0.0, "has_answer": 0.0})


def test_beijing_as_the_policys_answer_is(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["Beijing"], ("<answer>beijing.</answer><|endoftext|>", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == (1.0, {"exact_match": 1.0, "has_answer": 1.0})


@pytest.mark.parametrize("text", ["<information><answer>Rome</answer></information>", "\nuse <answer>Rome</answer>\n"])
def test_environment_text_is_not_an_answer(byte_tokenizer, text):
    turns = [("<search> q </search>", text), ("hm", None)]
    trajectory = written(byte_tokenizer, ["Rome"], *turns)
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 0.0


def test_tags_do_not_reach_across_turns(byte_tokenizer):
    turns = [("<answer> Ro", FEEDBACK), ("me </answer>", None)]
    trajectory = written(byte_tokenizer, ["Rome"], *turns)
    assert read_trajectory(trajectory, byte_tokenizer).answer is None


def test_last_turn_with_an_answer_counts(byte_tokenizer):
    turns = [("<answer>a</answer>", None), ("<answer>b</answer>", None), ("c", None)]
    assert read_trajectory(written(byte_tokenizer, ["b"], *turns), byte_tokenizer).answer == "b"


def test_target_as_one_text(byte_tokenizer):
    trajectory = written(byte_tokenizer, "Rome", ("<answer>rome</answer>", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0


def test_unicode(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["\u5317\u4eac"], ("<answer> \u5317\u4eac </answer>", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0


def test_wrong_answer_score(byte_tokenizer):
    wrong = written(byte_tokenizer, ["Rome"], ("<answer>Paris</answer>", None))
    silent = written(byte_tokenizer, ["Rome"], ("Paris", None))
    reward = ExactMatchReward(wrong_answer_score=0.1)
    assert reward.score(wrong, byte_tokenizer) == (0.1, {"exact_match": 0.0, "has_answer": 1.0})
    assert reward.score(silent, byte_tokenizer)[0] == 0.0


@pytest.mark.parametrize("target", [[], None, [1], 5])
def test_row_without_gold_answers(byte_tokenizer, target):
    trajectory = written(byte_tokenizer, target, ("<answer>x</answer>", None))
    with pytest.raises(DataError, match="nq"):
        ExactMatchReward().score(trajectory, byte_tokenizer)
