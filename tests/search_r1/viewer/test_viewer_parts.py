"""Tokens, parts, gold answers, advantages: the pieces that the page is made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.viewer.dashboard import group_advantages
from search_r1.viewer.runs import RunSettings
from search_r1.viewer.segments import (
    GoldFinder,
    gold_answers,
    passages_of,
    split_segment,
    token_ranges,
    token_texts,
    token_values,
)
from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.advantages.inputs import AdvantageInput, AdvantageSettings


@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_byte_level_texts_together_are_the_decoding(byte_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """Also of bytes that are no character, as an untrained policy samples them."""
    texts = token_texts(byte_tokenizer.backend_tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == byte_tokenizer.decode(ids)


def test_a_character_belongs_to_its_last_token(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer("a\u00e9", add_special_tokens=False)["input_ids"]
    assert token_texts(byte_tokenizer.backend_tokenizer, ids) == ["a", "", "\u00e9"]


def test_an_added_token_with_other_letters_stands_for_itself() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["ab"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken("<\uff5cstart of\u2581text\uff5c>")])
    ids = tokenizer.encode("a<\uff5cstart of\u2581text\uff5c>b").ids
    assert token_texts(tokenizer, ids) == ["a", "<\uff5cstart of\u2581text\uff5c>", "b"]


def test_a_tokenizer_with_spaces_in_front_of_words() -> None:
    """As SentencePiece: a word's space is shown unless the word is the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(["the river ends"] * 3, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    ids = tokenizer.encode("the river ends").ids
    assert len(ids) == 3 and token_texts(tokenizer, ids) == ["the", " river", " ends"]


def test_bytes_of_a_fallback_are_one_character() -> None:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = tokenizer.encode("a\u00e9a").ids
    assert token_texts(tokenizer, ids) == ["a", "", "\u00e9", "a"]


def kinds(source: str, text: str, event: dict[str, object] | None = None) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in split_segment(source, text, event, SEARCH_R1)]


def test_the_parts_of_a_turn() -> None:
    assert kinds("policy", "so <think>a</think>\n<search>b</search>") == [
        ("text", "so "), ("think", "<think>a</think>"), ("text", "\n"), ("search", "<search>b</search>"),
    ]  # fmt: skip
    assert kinds("policy", "<think>a<answer>b</answer>") == [("think", "<think>a"), ("answer", "<answer>b</answer>")]
    assert kinds("policy", "<think>never closed") == [("think", "<think>never closed")]
    assert kinds("policy", "") == []


def test_who_wrote_a_text_follows_from_its_segment() -> None:
    assert kinds("prompt", "<answer>x</answer>") == [("text", "<answer>x</answer>")]
    assert kinds("environment", "<answer>x</answer>", {"query": "q"}) == [("information", "<answer>x</answer>")]
    assert kinds("environment", "no", {"query": "q", "executed": False}) == [("feedback", "no")]
    assert kinds("environment", "no") == [("feedback", "no")]


def test_a_template_with_other_tags() -> None:
    grammar = Grammar(think="plan", search="look_up", answer="reply")
    parts = split_segment("policy", "<plan>a</plan><look_up>b</look_up>", None, grammar)
    assert [part.kind for part in parts] == ["think", "search"]


@given(texts=st.lists(st.sampled_from(["<think>", "a", "", "</think><", "search>", "</search>"]), max_size=12))
def test_every_token_is_in_one_part(texts: list[str]) -> None:
    parts = split_segment("policy", "".join(texts), None, SEARCH_R1)
    ranges = token_ranges(parts, texts)
    assert [place for first, last in ranges for place in range(first, last)] == list(range(len(texts) if parts else 0))


def test_a_token_over_a_border_belongs_to_where_it_begins() -> None:
    texts = ["<think>", "a", "</think><", "search>", "b"]
    parts = split_segment("policy", "".join(texts), None, SEARCH_R1)
    assert [part.text for part in parts] == ["<think>a</think>", "<search>b"]
    assert token_ranges(parts, texts) == [(0, 3), (3, 5)]


@pytest.mark.parametrize(
    ("stored", "answers"),
    [
        (None, []),
        ("null", []),
        ('{"target": ["Loire", "The Loire"], "other": 1}', ["Loire", "The Loire"]),
        ('{"target": "Loire"}', ["Loire"]),
        ('{"target": 42}', ["42"]),
        ('{"target": "[1, 2]"}', ["[1, 2]"]),  # what the reward compares with
        ('{"target": []}', []),
        ('"Loire"', ["Loire"]),
        ("Loire, not JSON", ["Loire, not JSON"]),
        ('["Loire", ["The Loire"]]', ["Loire", "The Loire"]),
        ('{"answers": ["Loire"], "unit": null}', ["Loire"]),
        ('{"ground_truth": {"answer": "Loire"}}', ["Loire"]),
        ('{"a": "Loire", "b": 3}', ["Loire", "3"]),
        ('"[\\"Loire\\", \\"The Loire\\"]"', ["Loire", "The Loire"]),  # JSON within a text
        ('"{\\"answer\\": \\"Loire\\"}"', ["Loire"]),
        ('"{x}"', ["{x}"]),
    ],
)
def test_gold_answers_of_any_form(stored: str | None, answers: list[str]) -> None:
    assert gold_answers(stored) == answers


@pytest.mark.parametrize(
    ("gold", "text", "found"),
    [
        (["Loire"], "the LOIRE, not Loirette", ["LOIRE"]),
        (["New York"], "new-york and New  York", ["new-york", "New  York"]),
        (["York", "New York"], "New York", ["New York"]),  # the longest
        (["a.c"], "abc a.c", ["a.c"]),
        (["?", ""], "why? because", []),
        ([], "anything", []),
        (["首都"], "东京是日本的首都，也是", ["首都"]),
        (["東京タワー", "333"], "高さ333メートルの東京タワーです", ["333", "東京タワー"]),
        (["서울"], "수도는 서울이다", ["서울"]),
        (["เมืองหลวง"], "เป็นเมืองหลวงของ", ["เมืองหลวง"]),
        (["दिल्ली"], "नई दिल्ली और दिल्लीवाला", ["दिल्ली"]),
        (["दिल्"], "नई दिल्ली", []),
    ],
)
def test_gold_answers_in_a_text(gold: list[str], text: str, found: list[str]) -> None:
    runs = GoldFinder(gold).runs(text)
    assert [part for part, is_gold in runs if is_gold] == found
    assert "".join(part for part, _ in runs) == text


def test_passages_of_a_search() -> None:
    observation = SEARCH_R1.wrap_information('Doc 1(Title: "A") one\nDoc 2(Title: "B") two Doc 3\n')
    event = {"query": "q", "observation": observation, "document_ids": ["7", ""], "scores": [1.5]}
    first, second = passages_of(event, SEARCH_R1)
    assert (first.title, first.text, first.id, first.score) == ("A", "one", "7", 1.5)
    assert (second.title, second.text, second.id, second.score) == ("B", "two Doc 3", None, None)


def test_passages_in_another_layout_are_one_text() -> None:
    """Another environment may write what it likes."""
    (only,) = passages_of({"query": "q", "observation": "plain words"}, SEARCH_R1)
    assert (only.title, only.text, only.id) == ("", "plain words", None)


@pytest.mark.parametrize("scaled", [True, False])
@given(rewards=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.1]), min_size=1, max_size=8))
def test_advantages_are_those_of_training(scaled: bool, rewards: list[float]) -> None:
    config = {"algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": scaled}}
    shown, formula = group_advantages(rewards, RunSettings(config, SEARCH_R1, None, ()))
    number = len(rewards)
    given_B = AdvantageInput(
        reward_T=torch.tensor(rewards, dtype=torch.float64),
        mask_T=torch.ones(number, dtype=torch.bool),
        row_T=torch.arange(number),
        group_B=torch.zeros(number, dtype=torch.int64),
    )
    trained = ADVANTAGES["grpo"](given_B, AdvantageSettings(scale="group_std" if scaled else "none"))
    assert formula
    assert shown == pytest.approx(trained.advantage_T.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"adv_estimator": "gae"},
        {"adv_estimator": "grpo", "use_kl_in_reward": True},
        {"adv_estimator": "grpo", "norm_adv_by_batch_std": True},
    ],
)
def test_no_advantage_where_rewards_do_not_tell(algorithm: dict[str, object]) -> None:
    settings = RunSettings({"algorithm": algorithm}, SEARCH_R1, None, ())
    assert group_advantages([1.0, 0.0], settings) == ([None, None], "")


def test_the_weights_of_a_turn_that_was_interrupted() -> None:
    """By hand: 2 tokens of a prompt, 5 of a turn under version 3 and then 4, 1 of a turn that does not say."""
    row = {
        "ids": list(range(8)),
        "loss_mask": [False] * 2 + [True] * 6,
        "weight_version": 4,
        "segments": [
            {"source": "prompt", "num_tokens": 2, "weight_versions": None},
            {"source": "policy", "num_tokens": 5, "weight_versions": [
                {"version": 3, "num_tokens": 2}, {"version": 4, "num_tokens": 3}]},
            {"source": "policy", "num_tokens": 1},
        ],
    }  # fmt: skip
    assert token_values(row) == {"weight_version": [None, None, 3, 3, 4, 4, 4, 4]}


def test_the_gap_is_there_where_both_log_probs_are() -> None:
    segments = [{"source": "prompt", "num_tokens": 1}, {"source": "policy", "num_tokens": 2}]
    row = {"ids": [1, 2, 3], "loss_mask": [False, True, True], "segments": segments, "weight_version": 0}
    found = token_values(row | {"log_probs": [0.0, -1.0, -2.0], "old_log_probs": [None, -1.25, None], "kl": None})
    assert found["gap"] == [None, -0.25, None] and found["log_probs"] == [None, -1.0, -2.0]
    assert list(found) == ["log_probs", "old_log_probs", "gap", "weight_version"]
