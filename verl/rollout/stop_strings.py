"""Whether sampled ids hold a stop string, asked once a token for every sequence of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The texts at which a turn ends, by the ids of one tokenizer.

    A text is whole when its last character is there. So ids are decoded only when the latest one can have brought that
    character, which a look into a set tells: for `</search>` the few tokens that have a `>` in them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._backend: Any = getattr(tokenizer, "_tokenizer", None)  # of a fast tokenizer: decodes without detours
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._endings = self._tokens_with({stop[-1] for stop in stops}) if stops else frozenset()

    def found(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last one of `ids`, those of a turn so far, completes; of several the first to end.

        Ids have to be asked about one by one as they are sampled: what an earlier id completed is not looked for.
        """
        if self._endings is not None and ids[-1] not in self._endings:
            return None
        text = self._decode(ids)
        ends = {stop: text.find(stop) + len(stop) for stop in self._stops if stop in text}
        return min(ends, key=ends.__getitem__, default=None)

    def _tokens_with(self, characters: set[str]) -> frozenset[int] | None:
        """The ids whose text has one of them.

        None where any id may bring one: several tokens may share the bytes of a character beyond ASCII, and a decoder
        may leave out the space of a token that it is given alone.
        """
        if not all("!" <= character <= "~" for character in characters):
            return None
        size = len(self._tokenizer)
        texts = (self._decode([token]) for token in range(size))
        return frozenset(token for token, text in enumerate(texts) if not characters.isdisjoint(text))

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
