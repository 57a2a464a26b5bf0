"""Exact match: only the policy's own words count."""

from __future__ import annotations

import pytest

from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.rewards.metrics import exact_match
from search_r1.rewards.normalize import normalize_answer
from search_r1.rewards.reading import read_trajectory
from verl.agent.text import encode_text
from verl.errors import DataError
from verl.protocol import Prompt, Segment, Source, Trajectory

PROMPT = "answer between <answer> and </answer>, for example <answer> Beijing </answer>. Question: where?\n"


def trajectory_of(tokenizer, target, *turns: tuple[Source, str]) -> Trajectory:
    row = {"reward_model": {"style": "rule", "ground_truth": {"target": target}}}
    trajectory = Trajectory("g", Prompt(encode_text(tokenizer, PROMPT), "nq", row))
    for source, text in ((Source.PROMPT, PROMPT), *turns):
        ids = encode_text(tokenizer, text)
        log_probs = (0.0,) * len(ids) if source is Source.POLICY else None
        trajectory.segments.append(Segment(source, ids, log_probs))
        if source is Source.POLICY:
            trajectory.events.append({})
    return trajectory


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
    trajectory = trajectory_of(byte_tokenizer, ["Beijing"], (Source.POLICY, "I do not know.<|endoftext|>"))
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == (0.0, {"exact_match": 0.0, "has_answer": 0.0})


def test_beijing_as_the_policys_answer_is(byte_tokenizer):
    trajectory = trajectory_of(byte_tokenizer, ["Beijing"], (Source.POLICY, "<answer>beijing.</answer><|endoftext|>"))
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == (1.0, {"exact_match": 1.0, "has_answer": 1.0})


@pytest.mark.parametrize("text", ["<information><answer>Rome</answer></information>", "\nuse <answer>Rome</answer>\n"])
def test_environment_text_is_not_an_answer(byte_tokenizer, text):
    turns = [(Source.POLICY, "<search> q </search>"), (Source.ENVIRONMENT, text), (Source.POLICY, "hm")]
    trajectory = trajectory_of(byte_tokenizer, ["Rome"], *turns)
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 0.0


def test_tags_do_not_reach_across_turns(byte_tokenizer):
    turns = [(Source.POLICY, "<answer> Ro"), (Source.ENVIRONMENT, "\nno action\n"), (Source.POLICY, "me </answer>")]
    trajectory = trajectory_of(byte_tokenizer, ["Rome"], *turns)
    assert read_trajectory(trajectory, byte_tokenizer).answer is None


def test_last_turn_with_an_answer_counts(byte_tokenizer):
    turns = [(Source.POLICY, "<answer>a</answer>"), (Source.POLICY, "<answer>b</answer>"), (Source.POLICY, "c")]
    assert read_trajectory(trajectory_of(byte_tokenizer, ["b"], *turns), byte_tokenizer).answer == "b"


def test_any_alias_matches_and_a_single_text_is_one():
    assert exact_match("the NYC", ["New York", "NYC"])
    assert not exact_match("New York City", ["New York", "NYC"])
    assert not exact_match("e", ["e f"])


def test_target_as_one_text(byte_tokenizer):
    trajectory = trajectory_of(byte_tokenizer, "Rome", (Source.POLICY, "<answer>rome</answer>"))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0


def test_unicode(byte_tokenizer):
    trajectory = trajectory_of(byte_tokenizer, ["\u5317\u4eac"], (Source.POLICY, "<answer> \u5317\u4eac </answer>"))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0


def test_targets_that_normalise_to_nothing():
    assert exact_match(" a ", ["A"])
    assert not exact_match("", ["A"])
    assert not exact_match("the", ["A"])
    assert not exact_match("", [""])


def test_wrong_answer_score(byte_tokenizer):
    wrong = trajectory_of(byte_tokenizer, ["Rome"], (Source.POLICY, "<answer>Paris</answer>"))
    silent = trajectory_of(byte_tokenizer, ["Rome"], (Source.POLICY, "Paris"))
    reward = ExactMatchReward(wrong_answer_score=0.1)
    assert reward.score(wrong, byte_tokenizer) == (0.1, {"exact_match": 0.0, "has_answer": 1.0})
    assert reward.score(silent, byte_tokenizer)[0] == 0.0


@pytest.mark.parametrize("target", [[], None, [1], 5])
def test_row_without_gold_answers(byte_tokenizer, target):
    trajectory = trajectory_of(byte_tokenizer, target, (Source.POLICY, "<answer>x</answer>"))
    with pytest.raises(DataError, match="nq"):
        ExactMatchReward().score(trajectory, byte_tokenizer)
