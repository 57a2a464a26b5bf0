"""Between token ids and text: ids are what is sampled and trained, text is only for finding tags and for reading."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

from verl.errors import DataError
from verl.protocol import Source, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of `text` alone: no BOS, no EOS."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode_turn(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a policy turn, without EOS and padding tokens.

    Other special tokens stay: a tokenizer may hold the tags of a grammar as special tokens, and skipping them would
    hide the policy's actions.
    """
    silent = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    kept = [token for token in ids if token not in silent]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_decoding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> None:
    """Raises `DataError` unless `ids` are, special tokens kept, the stored `text`: another tokenizer gave it then."""
    decoded = str(tokenizer.decode(list(ids)))
    if decoded != text:
        start = len(commonprefix([decoded, text]))
        here, there = decoded[start : start + 40], text[start : start + 40]
        raise DataError(f"the tokenizer is another one: at letter {start} it reads {here!r} in the ids, not {there!r}")


def policy_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One text for each policy turn: never the prompt, never what an environment wrote."""
    return [decode_turn(tokenizer, segment.ids) for segment in trajectory.segments if segment.source is Source.POLICY]
