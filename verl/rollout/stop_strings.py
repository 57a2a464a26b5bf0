"""Whether sampled ids contain a stop string, checked once per token for every sequence of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The texts at which a turn ends, by the ids of one tokenizer.

    A stop string is complete when its last character is there. So ids are decoded only if the latest one can contain
    that character, which a set lookup tells: for `</search>`, the few tokens with a `>` in them and before it nothing
    that is not in the stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer: decodes faster
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._endings = self._tokens_that_end_one() if stops else frozenset()

    def may_end_with(self, token: int) -> bool:
        """Whether this token may complete a stop string."""
        return self._endings is None or token in self._endings

    def found(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last of `ids` (the turn so far) completes; of several, the one that ends first.

        Call it for every id as it is sampled: a stop string that an earlier id completed is not found.
        """
        if not self.may_end_with(ids[-1]):
            return None
        text = self._decode(ids)
        ends = {stop: text.find(stop) + len(stop) for stop in self._stops if stop in text}
        return min(ends, key=ends.__getitem__, default=None)

    def _tokens_that_end_one(self) -> frozenset[int] | None:
        """The ids whose text can end a stop string.

        None if any id may: several tokens may share the bytes of a non-ASCII character, and a decoder may drop the
        space of a single token.
        """
        if not all("!" <= stop[-1] <= "~" for stop in self._stops):
            return None
        size = len(self._tokenizer)
        texts = (self._decode([token]) for token in range(size))
        return frozenset(token for token, text in enumerate(texts) if any(_can_end(text, one) for one in self._stops))

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _can_end(text: str, stop: str) -> bool:
    """Whether `stop` may end within a token's `text`, whose beginning and spaces depend on the tokens around it."""
    text, stop = ("".join(one.split()) for one in (text, stop))
    for end, character in enumerate(text, 1):
        if character == stop[-1]:
            known = text[:end].rpartition("\ufffd")[2]  # what follows the last byte that is not a character on its own
            if stop.endswith(known) or known.endswith(stop):
                return True
    return False
