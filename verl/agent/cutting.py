"""The longest beginning of a text that fits: how passages and results of tools are kept within their limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.agent.text import encode_outside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUTS = re.compile(r"(?<!\S)\S{1,30}(?!\S)|\S")  # a text may be cut behind each match
_FIRST_LENGTH = 4096  # characters; three passages of a hundred words are some 2,000


def cut_text(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> str:
    """`text`, or its beginning and a note that it was cut, in at most `most` tokens (None: no limit)."""
    if most is None:
        return text

    def fits(part: str) -> bool:
        return len(encode_outside(tokenizer, part)) <= most

    # If only white space at the end is too much, nothing was lost that a note has to tell.
    whole = longest_start(text, fits)
    if whole == text.rstrip():
        return text if fits(text) else whole
    # The note takes room, too; where nothing fits beside it, the text goes without it.
    note = f"\n[cut: {len(text)} characters in all]"
    shown = longest_start(text, lambda part: fits(part + note))
    return shown + note if shown else whole


def fits_in(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> bool:
    """Whether `text` has at most `most` tokens."""
    # Tokens have some characters each: what is much longer need not be encoded to know.
    return len(text) <= 100 * most and len(encode_outside(tokenizer, text)) <= most


def longest_start(text: str, fits: Callable[[str], bool]) -> str:
    """The longest prefix of `text` that fits, without trailing white space; "" if nothing fits.

    It ends at the end of a word; words of more than 30 characters, as in a script without spaces, may be cut anywhere.
    Found by doubling, then bisection: `fits` is called about 10 times, never with much more text than fits.
    """
    # Double the length until it does not fit.
    size = _FIRST_LENGTH
    while size < len(text) and fits(text[:size]):
        size *= 2
    if size >= len(text) and fits(text):
        return text.rstrip()
    # The limit is within `size`: find the last word that fits.
    ends = [0, *(match.end() for match in _CUTS.finditer(text[:size]))]
    low, high = 0, len(ends) - 1  # text[:ends[low]] fits or is empty
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(text[: ends[middle]]) else (low, middle - 1)
    return text[: ends[low]]
