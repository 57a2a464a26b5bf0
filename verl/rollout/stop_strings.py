"""Whether sampled ids hold a stop string, asked once a token for every sequence of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The texts at which a turn ends, by the ids of one tokenizer.

    A text is whole when its last character is there. So ids are decoded only when the latest one can have brought that
    character, which a look into a set tells: for `</search>` the few tokens that have a `>` in them, and before it
    nothing else than what the text has there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._backend: Any = getattr(tokenizer, "_tokenizer", None)  # of a fast tokenizer: decodes without detours
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._endings = self._tokens_that_end_one() if stops else frozenset()

    def may_end_with(self, token: int) -> bool:
        """Whether a stop string may be complete with this one."""
        return self._endings is None or token in self._endings

    def found(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last one of `ids`, those of a turn so far, completes; of several the first to end.

        Ids have to be asked about one by one as they are sampled: what an earlier id completed is not looked for.
        """
        if not self.may_end_with(ids[-1]):
            return None
        text = self._decode(ids)
        ends = {stop: text.find(stop) + len(stop) for stop in self._stops if stop in text}
        return min(ends, key=ends.__getitem__, default=None)

    def _tokens_that_end_one(self) -> frozenset[int] | None:
        """The ids whose text can end a stop string.

        None where any id may: several tokens may share the bytes of a character beyond ASCII, and a decoder may leave
        out the space of a token that it is given alone.
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
    """Whether `stop` may end within a token's `text`, of which the beginning and the spaces depend on its company."""
    text, stop = ("".join(one.split()) for one in (text, stop))
    ends = (place for place, character in enumerate(text, 1) if character == stop[-1])
    return any(stop.endswith(known) or known.endswith(stop) for known in (_known(text[:end]) for end in ends))


def _known(text: str) -> str:
    """What follows the last byte that is no character by itself."""
    return text.rpartition("\ufffd")[2]
