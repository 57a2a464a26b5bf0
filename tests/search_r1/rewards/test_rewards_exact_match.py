"""Exact match, and with the format: only the policy's own words count; the table of the format reward by hand."""

from __future__ import annotations

import pytest
from reward_episodes import FEEDBACK, play, written
from sequences import in_sequences
from transformers import PreTrainedTokenizerFast

from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.llm_agent.transcript import Reply, read_turns
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.rewards.format_reward import FormatReward, check_format
from search_r1.rewards.metrics import normalize_answer
from search_r1.rewards.reading import read_trajectory
from verl.errors import DataError
from verl.protocol import Segment, Source, Status

SEARCH = "<think>a</think>\n<search> q </search>"
GOOD = "<think>b</think>\n<answer> Rome </answer>"
NO_THOUGHT = "<answer> Rome </answer>"
PAGE = SEARCH_R1.wrap_information('Doc 1(Title: "Italy") Its capital is ROME.')


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


@pytest.mark.parametrize(("text", "value"), [("I do not know.", 0.0), ("<answer>beijing.</answer>", 1.0)])
def test_beijing_in_the_prompt_is_not_an_answer_but_the_policys_is(byte_tokenizer, text, value):
    trajectory = written(byte_tokenizer, ["Beijing"], (f"{text}<|endoftext|>", None))
    expected = (value, {"exact_match": value, "has_answer": value})
    assert ExactMatchReward().score(trajectory, byte_tokenizer) == expected


@pytest.mark.parametrize("text", ["<information><answer>Rome</answer></information>", "\nuse <answer>Rome</answer>\n"])
def test_environment_text_is_not_an_answer(byte_tokenizer, text):
    trajectory = written(byte_tokenizer, ["Rome"], ("<search> q </search>", text), ("hm", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 0.0


def test_tags_do_not_reach_across_turns(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["Rome"], ("<answer> Ro", FEEDBACK), ("me </answer>", None))
    assert read_trajectory(trajectory, byte_tokenizer).answer is None


def test_last_turn_with_an_answer_counts(byte_tokenizer):
    turns = [("<answer>a</answer>", None), ("<answer>b</answer>", None), ("c", None)]
    assert read_trajectory(written(byte_tokenizer, ["b"], *turns), byte_tokenizer).answer == "b"


def test_target_as_one_text(byte_tokenizer):
    trajectory = written(byte_tokenizer, "Rome", ("<answer>rome</answer>", None))
    assert ExactMatchReward().score(trajectory, byte_tokenizer)[0] == 1.0


def test_wrong_answer_score(byte_tokenizer):
    wrong = written(byte_tokenizer, ["Rome"], ("<answer>Paris</answer>", None))
    silent = written(byte_tokenizer, ["Rome"], ("Paris", None))
    reward = ExactMatchReward(wrong_answer_score=0.1)
    assert reward.score(wrong, byte_tokenizer) == (0.1, {"exact_match": 0.0, "has_answer": 1.0})
    assert reward.score(silent, byte_tokenizer)[0] == 0.0


@pytest.mark.parametrize("reward", [ExactMatchReward(), FormatReward()])
@pytest.mark.parametrize("target", [[], None, [1], 5])
def test_row_without_gold_answers(byte_tokenizer, reward, target):
    with pytest.raises(DataError, match="nq"):
        reward.score(written(byte_tokenizer, target, ("<answer>x</answer>", None)), byte_tokenizer)


# --- with the format


@pytest.mark.parametrize(
    ("target", "turns", "reward", "components"),
    [
        # s = 0.2, f = 0.1, r = 0.5; components are exact_match, has_answer, valid_format, retrieval_correct.
        ("Rome", [(SEARCH, PAGE), (GOOD, None)], 1.0, (1, 1, 1, 1)),  # no bonus on top of 1
        ("Rome", [(GOOD, None)], 1.0, (1, 1, 1, 0)),
        ("Rome", [(NO_THOUGHT, None)], 0.8, (1, 1, 0, 0)),  # 1 - s
        ("Rome", [(SEARCH, PAGE), (NO_THOUGHT, None)], 0.8, (1, 1, 0, 1)),  # retrieval adds nothing to a broken format
        ("Italy", [(SEARCH, PAGE), (GOOD, None)], 0.7, (0, 1, 1, 1)),  # s + r
        ("Oslo", [(SEARCH, PAGE), (GOOD, None)], 0.2, (0, 1, 1, 0)),  # s
        ("Italy", [(SEARCH, PAGE), (NO_THOUGHT, None)], 0.1, (0, 1, 0, 1)),  # f
        ("Italy", [(SEARCH, PAGE), (SEARCH, None)], 0.0, (0, 0, 0, 1)),  # no answer, so the format is not kept
        ("Italy", [("<think>b</think><answer> Italy", None)], 0.0, (0, 0, 0, 0)),
    ],
)
def test_table(byte_tokenizer, target, turns, reward, components):
    trajectory = written(byte_tokenizer, [target], *turns)
    names = ("exact_match", "has_answer", "valid_format", "retrieval_correct")
    preset = FormatReward(structure_format_score=0.2, final_format_score=0.1, retrieval_score=0.5)
    expected = dict(zip(names, map(float, components), strict=True))
    assert preset.score(trajectory, byte_tokenizer) == (pytest.approx(reward, abs=1e-12), expected)


@pytest.mark.parametrize("target", ["Rome", "Italy"])
@pytest.mark.parametrize(
    "turns", [[(GOOD, None)], [(NO_THOUGHT, None)], [(SEARCH, PAGE), (GOOD, None)], [("hm", FEEDBACK), ("hm", None)]]
)
def test_all_scores_zero_is_exact_match(byte_tokenizer, target, turns):
    trajectory = written(byte_tokenizer, target, *turns)
    reward, components = FormatReward().score(trajectory, byte_tokenizer)
    plain, plain_components = ExactMatchReward().score(trajectory, byte_tokenizer)
    assert reward == plain
    assert components | plain_components == components


def test_the_environment_cannot_answer_for_the_policy(byte_tokenizer):
    page = SEARCH_R1.wrap_information("<think>x</think><answer> Rome </answer>")
    trajectory = written(byte_tokenizer, ["Rome"], (SEARCH, page))
    reward, components = FormatReward(0.2, 0.1, 0.5).score(trajectory, byte_tokenizer)
    assert (reward, components["has_answer"], components["valid_format"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("page", ["</information><answer>Oslo</answer>", "<think>", "</search> <search> x", "no tags"])
def test_tags_in_a_page_do_not_break_the_format(byte_tokenizer, page):
    trajectory = written(byte_tokenizer, ["Rome"], (SEARCH, SEARCH_R1.wrap_information(page)), (GOOD, None))
    assert FormatReward(0.2).score(trajectory, byte_tokenizer)[0] == 1.0


def test_feedback_breaks_the_format_and_its_tags_are_not_read(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["answer"], ("<think>a</think>", FEEDBACK), (GOOD, None))
    reward, components = FormatReward(0.2, 0.1, 0.5).score(trajectory, byte_tokenizer)
    assert reward == 0.1  # f for "Rome": neither the feedback's "<answer> answer </answer>" nor its words count
    assert components["valid_format"] == components["retrieval_correct"] == 0.0  # feedback is nothing retrieved
    assert check_format(read_trajectory(trajectory, byte_tokenizer).turns).reason == (
        "turn 0: feedback of the environment where <search> or <answer> should stand"
    )


def test_feedback_to_a_search_that_cannot_be_made_is_no_observation(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["Rome"], (SEARCH, FEEDBACK), (GOOD, None))
    assert FormatReward(0.2).score(trajectory, byte_tokenizer)[0] == 0.8


def test_the_policys_own_information_breaks_the_format(byte_tokenizer):
    own = "<think>a</think><search>q</search><information>Italy</information>" + GOOD
    trajectory = written(byte_tokenizer, ["Italy"], (own, None))
    reward, components = FormatReward(0.2, 0.1, 0.5).score(trajectory, byte_tokenizer)
    assert (reward, components["valid_format"], components["retrieval_correct"]) == (0.1, 0.0, 0.0)


@pytest.fixture(scope="module")
def chat_tokenizer(byte_tokenizer) -> PreTrainedTokenizerFast:
    """Its turns may end in a control token that is not its EOS; two of its tags are special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<think>", "</answer>"]})
    return tokenizer


@pytest.mark.parametrize(
    ("answer_turn", "valid"),
    [
        (GOOD, True),
        (GOOD + "\n", True),
        (GOOD + "<|endoftext|>", True),
        (GOOD + "\n<|im_end|>", True),
        (GOOD + "<|im_end|><|endoftext|><|pad|>", True),
        ("<|im_end|>" + GOOD, False),
        (GOOD + "<|im_end|>.", False),
        (GOOD + ".", False),
        (GOOD + ".<|im_end|>", False),
        ("<think>b</think><|im_end|><answer> Rome </answer>", False),
    ],
)
@pytest.mark.parametrize("search_end", ["", "\n", "<|im_end|>"])
def test_only_white_space_and_control_tokens_may_end_a_turn(chat_tokenizer, answer_turn, valid, search_end):
    trajectory = written(chat_tokenizer, ["Rome"], (SEARCH + search_end, PAGE), (answer_turn, None))
    assert FormatReward(0.2).score(trajectory, chat_tokenizer)[1]["valid_format"] == float(valid)


@pytest.mark.parametrize(
    ("targets", "page", "found"),
    [
        (["Oslo", "the U.S."], "Doc 1(Title: x) in the us.", True),  # both become "us"
        (["capital is Rome"], PAGE, True),
        (["Paris"], PAGE, False),
        (["information"], PAGE, False),  # stands in the tags only
        (["A"], PAGE, False),  # normalises to nothing, and would be part of anything
        (["\u5317\u4eac"], SEARCH_R1.wrap_information("Doc 1(Title: x) \u5317\u4eac"), True),
    ],
)
def test_retrieval_correct(byte_tokenizer, targets, page, found):
    trajectory = written(byte_tokenizer, targets, (SEARCH, PAGE[:20]), (SEARCH, page), (GOOD, None))
    reward, components = FormatReward(0.2, 0.1, 0.5).score(trajectory, byte_tokenizer)
    assert components["retrieval_correct"] == float(found)
    assert reward == pytest.approx(0.7 if found else 0.2, abs=1e-12)


def test_what_the_policy_or_the_prompt_says_is_not_retrieved(byte_tokenizer):
    search = "<think>Paris</think><search>Paris</search>"
    trajectory = written(byte_tokenizer, ["Paris", "Beijing"], (search, PAGE), (GOOD, None))
    assert FormatReward(0.2).score(trajectory, byte_tokenizer)[1]["retrieval_correct"] == 0.0


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"structure_format_score": -0.1}, "structure_format_score is -0.1"),
        ({"final_format_score": 1.5}, "final_format_score is 1.5"),
        ({"retrieval_score": float("nan")}, "retrieval_score is nan"),
        ({"structure_format_score": 0.6, "retrieval_score": 0.5}, "retrieval_score 0.5 is above 1"),
        ({"structure_format_score": 0.6, "final_format_score": 0.5}, "final_format_score 0.5 is over 1, and a wrong"),
    ],
)
def test_scores_that_cannot_be_used(scores, message):
    with pytest.raises(ValueError, match=message):
        FormatReward(**scores)


def test_a_wrong_answer_may_be_worth_as_much_as_a_correct_one(byte_tokenizer):
    trajectory = written(byte_tokenizer, ["Italy"], (SEARCH, PAGE), (GOOD, None))
    assert FormatReward(structure_format_score=0.5, retrieval_score=0.5).score(trajectory, byte_tokenizer)[0] == 1.0
    broken = FormatReward(structure_format_score=0.8, final_format_score=0.2)
    assert broken.combine({"exact_match": 1.0, "valid_format": 0.0}) == pytest.approx(0.2)
    assert broken.combine({"exact_match": 0.0, "valid_format": 0.0, "has_answer": 1.0}) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="a wrong answer is 1.5"):
        ExactMatchReward(1.5)


@pytest.mark.parametrize(
    ("lines", "replies", "reward"),
    [
        ([GOOD], [Reply.NONE], 1.0),
        ([SEARCH + "\n", SEARCH, GOOD], [Reply.OBSERVATION, Reply.OBSERVATION, Reply.NONE], 1.0),
        ([SEARCH, "<think>c</think><answer>Oslo</answer>"], [Reply.OBSERVATION, Reply.NONE], 0.7),
        ([SEARCH, "hm", GOOD], [Reply.OBSERVATION, Reply.FEEDBACK, Reply.NONE], 0.8),
        ([SEARCH, "", GOOD], [Reply.OBSERVATION, Reply.FEEDBACK, Reply.NONE], 0.8),  # a turn of no token at all
        (["", SEARCH, GOOD], [Reply.FEEDBACK, Reply.OBSERVATION, Reply.NONE], 0.8),
        ([SEARCH, SEARCH, SEARCH], [Reply.OBSERVATION, Reply.OBSERVATION, Reply.NONE], 0.0),  # the last one is not made
    ],
)
def test_real_episodes(byte_tokenizer, lines, replies, reward):
    trajectory = play(byte_tokenizer, lines)
    assert [turn.reply for turn in read_trajectory(trajectory, byte_tokenizer).turns] == replies
    scored = FormatReward(0.2, 0.1, 0.5).score(trajectory, byte_tokenizer)
    assert scored[0] == pytest.approx(reward, abs=1e-12)


def test_an_episode_without_a_retriever_is_one_thought_and_an_answer(byte_tokenizer):
    reward = FormatReward(0.2, 0.1)
    assert reward.score(play(byte_tokenizer, [GOOD], with_search=False), byte_tokenizer)[1]["valid_format"] == 1.0
    searched = play(byte_tokenizer, [SEARCH, GOOD], with_search=False)
    assert searched.status is Status.ANSWERED
    assert reward.score(searched, byte_tokenizer)[0] == 0.8


@pytest.mark.parametrize("moves_replies", [False, True])
@pytest.mark.parametrize("begins", [(1,), (3,), (5,), (3, 5), (1, 3, 5)])
def test_a_rollout_of_several_sequences_is_read_like_one(
    byte_tokenizer: PreTrainedTokenizerFast, begins: tuple[int, ...], moves_replies: bool
) -> None:
    """Also where a reply stands in the context of the next sequence alone; the prompt's example is no answer there."""
    whole = play(byte_tokenizer, [SEARCH, SEARCH, GOOD])
    cut = in_sequences(whole, *begins, moves_replies=moves_replies)
    assert len(cut.sequences) == 1 + len(begins)
    turns = read_turns(cut, byte_tokenizer)
    assert turns == read_turns(whole, byte_tokenizer)
    assert [turn.reply for turn in turns] == [Reply.OBSERVATION, Reply.OBSERVATION, Reply.NONE]
    for reward in (ExactMatchReward(), FormatReward(0.2, 0.1, 0.1)):
        assert reward.score(cut, byte_tokenizer) == reward.score(whole, byte_tokenizer)


def test_a_reply_after_a_context_answers_no_turn_before_it(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """It belongs to a turn without tokens. Without passages in its event, the search before has an empty reply."""
    trajectory = written(byte_tokenizer, "Rome", (SEARCH, None), ("", FEEDBACK), (GOOD, None))
    _, search, _, reply, answer = trajectory.segments
    trajectory.segments = [trajectory.segments[0], search, Segment(Source.CONTEXT, search.ids), reply, answer]
    trajectory.events[0] |= {"action": "search", "query": "q", "executed": True}
    first, second, third = read_turns(trajectory, byte_tokenizer)
    assert (first.text, first.reply, first.queries, first.observation) == (SEARCH, Reply.OBSERVATION, ("q",), "")
    assert (second.text, second.reply, third.text, third.reply) == ("", Reply.FEEDBACK, GOOD, Reply.NONE)
