"""What the policy reads: passages in the layout of Search-R1, within a number of tokens.

"\\n\\n<information>Doc 1(Title: "T") text\\nDoc 2(Title: ...) ...</information>\\n\\n"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.search.sanitize import strip_agent_tags
from verl.agent.text import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_RESULTS = "No results found."


@dataclass(frozen=True)
class Observation:
    """What the policy reads after a search; the first `num_documents` documents are in it."""

    text: str
    ids: tuple[int, ...]
    num_documents: int


class ObservationWriter:
    """Writes documents into observations of at most `max_length` tokens whose closing tag is always there.

    Last documents are left out first. If not even the first one fits, its text is cut at a word where there is one.
    Tags and special tokens in a document are removed: a page cannot speak for the policy or end its turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, grammar: Grammar = SEARCH_R1) -> None:
        self._tokenizer, self._max_length, self._grammar = tokenizer, max_length, grammar
        literals = sorted(special_tokens(tokenizer), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, literals)) or "(?!)")

    def write(self, documents: Sequence[Mapping[str, Any]]) -> Observation:
        """`documents` have `contents`: a title line, then text. None at all gives a sentence that says so."""
        if not documents:
            return self._start_of(NO_RESULTS, 0)
        passages = [format_passage(i, self._clean(doc["contents"])) for i, doc in enumerate(documents, start=1)]
        for count in range(len(passages), 0, -1):
            observation = self._observation("".join(passages[:count]), count)
            if observation is not None:
                return observation
        return self._start_of(passages[0], 1)

    def _clean(self, contents: str) -> str:
        # Removing a tag may join the halves of a control token, so these go last; a space joins nothing.
        return self._control.sub(" ", strip_agent_tags(contents, self._grammar.names))

    def _observation(self, body: str, num_documents: int) -> Observation | None:
        """None when it is too long."""
        text = self._grammar.wrap_information(body)
        ids = encode_text(self._tokenizer, text)
        return Observation(text, ids, num_documents) if len(ids) <= self._max_length else None

    def _start_of(self, body: str, num_documents: int) -> Observation:
        start = longest_start(body, lambda part: self._observation(part, num_documents) is not None)
        observation = self._observation(start, num_documents)
        if observation is None:
            raise ValueError(f"{self._max_length} tokens do not hold an empty observation")
        return observation


def format_passage(number: int, contents: str) -> str:
    """One document as the policy reads it; the first line of `contents` is its title and keeps its quotes."""
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}\n"


def wrap_feedback(sentence: str) -> str:
    return f"\n{sentence.strip()}\n"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    """Texts that the tokenizer would turn into control tokens, wherever they come from."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token}


def longest_start(text: str, fits: Callable[[str], bool]) -> str:
    """The longest start of `text` that fits, moved back to a word's end unless that loses half of it.

    Found by bisection, so `fits` is called about 2 + log2(len(text)) times. "" when nothing fits.
    """
    low, high = 0, len(text)  # text[:low] fits or is empty; a longer one than text[:high] does not fit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(text[:middle]) else (low, middle - 1)
    start = text[:low]
    word_end = max(start.rfind(" "), start.rfind("\n"))
    if low < len(text) and not text[low].isspace() and word_end > low // 2:
        start = start[:word_end]
    start = start.rstrip()
    while start and not fits(start):  # a shorter text may have more tokens, at the seam with the closing tag
        start = start[:-1]
    return start
