"""Between token ids and text: ids are sampled and trained on, text serves only to find tags and to be read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING

from verl.errors import DataError
from verl.protocol import Source, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_REPLACEMENT = "\ufffd"  # how bytes are decoded that are no character, or none yet


@lru_cache(maxsize=256)  # a reply is measured, then encoded, and trajectories of one question look the same things up
def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of `text` alone: no BOS, no EOS; half a surrogate pair, which is no character, is read as U+FFFD."""
    return tuple(tokenizer(whole_characters(text), add_special_tokens=False)["input_ids"])


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which can be neither tokenized nor stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def decode_turn(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a policy turn, without EOS and padding tokens.

    Other special tokens stay: a tokenizer may hold the tags of a grammar as special tokens, and skipping them would
    hide the policy's actions.
    """
    return _decode(tokenizer, _without_silent(tokenizer, ids))


class TurnDecoder:
    """Incremental `decode_turn`, for a turn that is still being sampled.

    The texts put together are exactly the text of the turn, and none ends inside a character that spans several tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from `_start` on are decoded again, since a token's text may depend on the one before it; the text of
        # those up to `_read` was given out.
        self._start = self._read = 0
        self._given = 0  # characters

    def feed(self, ids: Sequence[int]) -> str:
        """The text that the next `ids` complete; "" while a character is incomplete."""
        self._ids += _without_silent(self._tokenizer, ids)
        before = _decode(self._tokenizer, self._ids[self._start : self._read])
        text = _decode(self._tokenizer, self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._given += len(text) - len(before)
        return text[len(before) :]

    def end(self) -> str:
        """The rest of the turn: bytes that never completed a character, as the tokenizer decodes them."""
        return _decode(self._tokenizer, self._ids)[self._given :]


def check_decoding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> None:
    """Raises `DataError` if `ids`, special tokens kept, do not decode to `text`: they are another tokenizer's."""
    decoded = str(tokenizer.decode(list(ids)))
    if decoded != text:
        start = len(commonprefix([decoded, text]))
        here, there = decoded[start : start + 40], text[start : start + 40]
        raise DataError(
            f"the tokenizer is not the one that wrote these ids: at character {start} they decode to {here!r}, "
            f"not {there!r}"
        )


def policy_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One text for each policy turn; the prompt and the environment's replies are never included."""
    return [decode_turn(tokenizer, segment.ids) for segment in trajectory.segments if segment.source is Source.POLICY]


def _without_silent(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    silent = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return [token for token in ids if token not in silent]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
