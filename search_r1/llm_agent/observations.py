"""What the policy reads after a search: passages in Search-R1's format, within a token limit.

"\\n\\n<information>Doc 1(Title: "T") text\\nDoc 2(Title: ...) ...</information>\\n\\n"
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.search.sanitize import strip_agent_tags
from verl.agent.text import encode_outside, longest_start, whole_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_RESULTS = "No results found."


@dataclass(frozen=True)
class Observation:
    """What the policy reads after a search: the first `num_documents` documents, the last one possibly truncated."""

    text: str
    ids: tuple[int, ...]
    num_documents: int


class ObservationWriter:
    """Writes documents into observations of at most `max_length` tokens that always have their closing tag.

    Documents are written in order, in full while they fit. The first one that does not fit is truncated at the end of a
    word, and later ones are left out, so nearly all of the limit is used. A document of which only the title would fit
    is left out, too, unless it is the first. The text is chosen first, then tokenized as a whole, so that ids and text
    agree. Tags in a document are removed, and what looks like a control token is encoded by its characters, so that a
    page cannot act for the policy or end its turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, grammar: Grammar = SEARCH_R1) -> None:
        self._tokenizer, self._max_length, self._grammar = tokenizer, max_length, grammar

    def write(self, documents: Sequence[Mapping[str, Any]]) -> Observation:
        """`documents` have `contents`: a title line, then text. Without documents, the text says so."""
        if not documents:
            return self._observation(longest_start(NO_RESULTS, self._fits), 0)
        # All documents as one text, cut where the limit is.
        names = self._grammar.names
        cleaned = [strip_agent_tags(whole_characters(document["contents"]), names) for document in documents]
        passages = [format_passage(number, contents) for number, contents in enumerate(cleaned, start=1)]
        starts = list(accumulate(map(len, passages), initial=0))
        body = longest_start("".join(passages), self._fits)
        # Leave the last document out if only its title would fit, unless it is the first.
        count = bisect_left(starts, len(body), hi=len(passages))  # the documents that begin before its end
        if count > 1 and len(body) - starts[count - 1] < _least_shown(count, cleaned[count - 1]):
            count -= 1
            body = longest_start(body[: starts[count]], self._fits)
        return self._observation(body, count)

    def _fits(self, body: str) -> bool:
        return len(self._encode(self._grammar.wrap_information(body))) <= self._max_length

    def _encode(self, text: str) -> tuple[int, ...]:
        return encode_outside(self._tokenizer, text, self._grammar.tags)

    def _observation(self, body: str, num_documents: int) -> Observation:
        text = self._grammar.wrap_information(body)
        ids = self._encode(text)
        if len(ids) > self._max_length:
            raise ValueError(f"{self._max_length} tokens do not hold an empty observation")
        return Observation(text, ids, num_documents)


def format_passage(number: int, contents: str) -> str:
    """One document as the policy reads it; the first line of `contents` is its title and keeps its quotes."""
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}\n"


def _least_shown(number: int, contents: str) -> int:
    """How many characters of a formatted document reach the first one of its text, or the end of its title if it has
    no text."""
    title, _, text = contents.partition("\n")
    without_text = len(format_passage(number, title).rstrip())
    return without_text + 1 + text.index(text.strip()[0]) + 1 if text.strip() else without_text


def wrap_feedback(sentence: str) -> str:
    return f"\n{sentence.strip()}\n"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    """Strings that the tokenizer would encode as control tokens, whatever their origin."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token}
