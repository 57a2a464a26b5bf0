"""Stop strings in ids: found at the token at which vLLM's own reader of text finds them, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.rollout.turn_scheduler import StopStrings

SIZE = 300  # entries of byte_tokenizer
STOPS = ("</search>", "a>", "> <", "\u6cb3", " ", ">>")


def first_found(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], ids: Sequence[int]) -> tuple[int, str] | None:
    """The number of ids after which a stop string is there, and which."""
    reader = StopStrings(tokenizer, stops)
    counts = range(1, len(ids) + 1)
    return next(((count, stop) for count in counts if (stop := reader.found(ids[:count]))), None)


def found_by_vllm(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], ids: Sequence[int]
) -> tuple[int, str] | None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import SlowIncrementalDetokenizer

    how = SamplingParams(stop=list(stops), include_stop_str_in_output=True, skip_special_tokens=False)
    request = EngineCoreRequest("0", [], None, how, None, 0.0, None, None, None)
    reader = SlowIncrementalDetokenizer(tokenizer, request)
    stops_found = ((count, reader.update([token], False)) for count, token in enumerate(ids, 1))
    return next(((count, stop) for count, stop in stops_found if stop), None)


@given(ids=st.lists(st.integers(2, SIZE - 1), max_size=60), stops=st.lists(st.sampled_from(STOPS), max_size=3))
def test_any_ids_stop_where_vllm_stops(byte_tokenizer, ids, stops) -> None:
    assert first_found(byte_tokenizer, stops, ids) == found_by_vllm(byte_tokenizer, stops, ids)


@given(
    parts=st.lists(st.sampled_from(["<search> the </search>", "river", "a>", "\u6cb3", "> <", ">", " "]), max_size=8),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
)
@example(parts=["river", "a>", "> <"], stops=["> <", ">>", "a>"])
def test_a_text_stops_where_vllm_stops(byte_tokenizer, parts, stops) -> None:
    ids = byte_tokenizer("".join(parts))["input_ids"]
    assert first_found(byte_tokenizer, stops, ids) == found_by_vllm(byte_tokenizer, stops, ids)


def test_of_two_that_one_token_completes_the_first_to_end_is_meant() -> None:
    words = {"<unk>": 0, "ab>c>": 1}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")))
    assert first_found(tokenizer, ("c>", "b>"), [0, 1]) == (2, "b>")


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their space in front, as in SentencePiece: the first word of a text is decoded without it."""
    words = ["<unk>", "\u2581the", "\u2581river", "s>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_space_that_a_token_has_only_in_company(word_tokenizer) -> None:
    assert first_found(word_tokenizer, (" ",), [1, 3, 2]) == (3, " ")
    assert first_found(word_tokenizer, ("rivers>",), [1, 3, 2, 3]) == (4, "rivers>")


def test_a_token_that_ends_no_stop_string_is_told_from_those_that_may(byte_tokenizer) -> None:
    reader = StopStrings(byte_tokenizer, ("</search>", "\u6cb3>"))
    close, other = (byte_tokenizer(text)["input_ids"][-1] for text in ("</search>", "a>"))
    assert reader.may_end_with(close)
    texts = {token: byte_tokenizer.decode([token]) for token in range(SIZE)}
    assert all(">" in texts[token] for token in texts if reader.may_end_with(token))
    assert reader.may_end_with(other) == (texts[other] == ">"), "with a letter before it that the stop string has not"


def test_nothing_is_found_without_stop_strings(byte_tokenizer) -> None:
    assert first_found(byte_tokenizer, (), byte_tokenizer("<search> the </search>")["input_ids"]) is None
