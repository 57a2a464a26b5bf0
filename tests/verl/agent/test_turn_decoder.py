"""Decoding a turn while it is sampled: nothing is lost, nothing is doubled, no character is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.agent.text import TurnDecoder, decode_turn, encode_text

SIZE = 300  # entries of byte_tokenizer


def texts_of(tokenizer: PreTrainedTokenizerFast, pieces: list[list[int]]) -> list[str]:
    decoder = TurnDecoder(tokenizer)
    return [*map(decoder.feed, pieces), decoder.end()]


@given(pieces=st.lists(st.lists(st.integers(0, SIZE - 1), max_size=6), max_size=40))
def test_any_ids_in_any_pieces_give_the_text_of_the_turn(byte_tokenizer, pieces) -> None:
    """Also bytes that are no character, and end-of-sequence tokens in the middle."""
    ids = [token for piece in pieces for token in piece]
    assert "".join(texts_of(byte_tokenizer, pieces)) == decode_turn(byte_tokenizer, ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_no_character_is_split(byte_tokenizer, text) -> None:
    texts = texts_of(byte_tokenizer, [[token] for token in encode_text(byte_tokenizer, text)])
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


def test_a_text_comes_with_the_token_that_completes_it(byte_tokenizer) -> None:
    ids = encode_text(byte_tokenizer, "a\u6cb3b")
    assert len(ids) == 5  # the character is three tokens
    assert texts_of(byte_tokenizer, [[token] for token in ids]) == ["a", "", "", "\u6cb3", "b", ""]


def test_a_turn_that_ends_inside_a_character(byte_tokenizer) -> None:
    ids = encode_text(byte_tokenizer, "a\u6cb3")[:-1]
    assert texts_of(byte_tokenizer, [list(ids)]) == ["", "a\ufffd"]


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their space in front, as in SentencePiece: the first word of a text is decoded without it."""
    words = ["<unk>", "\u2581the", "\u2581river", "s", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def test_spaces_between_words_stay(word_tokenizer) -> None:
    assert decode_turn(word_tokenizer, [1, 2, 3, 1, 4]) == "the rivers the"
    assert texts_of(word_tokenizer, [[1], [2], [3], [1], [4]]) == ["the", " river", "s", " the", "", ""]
