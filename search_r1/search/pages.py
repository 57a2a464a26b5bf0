"""The page that a passage of a corpus belongs to: the passages of the same title around it, in the corpus' order."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from long_task import Progress
from search_r1.errors import CorpusError
from search_r1.search.corpus import Corpus, title_and_text

MAX_PASSAGES = 2000  # of one page, before and after the passage
_SAMPLED_ROWS = 1024


@dataclass(frozen=True)
class Page:
    """`text` is that of all passages, each on lines of its own; `start` is the place of the passage that was asked for,
    in characters. `truncated`: the page goes on after its text, or has begun before it."""

    id: str
    title: str
    text: str
    start: int
    num_passages: int
    truncated: bool


class Pages:
    """Finds pages by the id of a passage. It may be called from several threads.

    A corpus whose ids are the numbers of its rows, as a sample of them tells, needs nothing else. The ids of any other
    are read once, at the first request, which takes 16 bytes of memory a row.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._lock = threading.Lock()
        self._closed = False
        self._rows_of_ids: tuple[np.ndarray, np.ndarray] | None = None  # digests in order, and their rows

    def find(self, name: str, max_chars: int) -> Page | None:
        """The page of the passage with the id `name`; None if there is no such passage. Raises `CorpusError`.

        The text has at most `max_chars` characters, from the beginning of the page.
        """
        row = self._row(name)
        if row is None:
            return None
        # The rows of the same title around it; passages without a title are pages of their own.
        title, own = title_and_text(self._corpus[row]["contents"])
        before, after = [], []
        if title:
            before = self._neighbours(row, -1, title)[::-1]
            after = self._neighbours(row, 1, title)
        texts = [text.strip() for text in (*before, own, *after)]
        start = sum(len(text) + 1 for text in texts[: len(before)])
        text = "\n".join(texts)
        cut = len(text) > max_chars or MAX_PASSAGES in (len(before), len(after))
        return Page(name, title, text[:max_chars], min(start, max_chars), len(texts), cut)

    def close(self) -> None:
        """Stop reading ids."""
        self._closed = True

    def _neighbours(self, row: int, step: int, title: str) -> list[str]:
        """The texts of the rows next to `row`, in the direction of `step`, while they have the title."""
        texts: list[str] = []
        while 0 <= row + step < len(self._corpus) and len(texts) < MAX_PASSAGES:
            row += step
            other, text = title_and_text(self._corpus[row]["contents"])
            if other != title:
                break
            texts.append(text)
        return texts

    def _row(self, name: str) -> int | None:
        # Many corpora number their rows, from 0 or from 1: the row of that number is looked at before any list of ids.
        for number in (int(name), int(name) - 1) if name.isascii() and name.isdecimal() and len(name) < 16 else ():
            if 0 <= number < len(self._corpus) and self._corpus[number]["id"] == name:
                return number
        if self._is_numbered:
            return None
        # Different ids may have one digest: of the rows that have it, next to each other, the id itself decides.
        digests, rows = self._index()
        digest = _digest(name)
        place = int(np.searchsorted(digests, digest))
        while place < len(digests) and digests[place] == digest:
            if self._corpus[int(rows[place])]["id"] == name:
                return int(rows[place])
            place += 1
        return None

    @cached_property
    def _is_numbered(self) -> bool:
        """Whether ids are the numbers of rows, from 0 or from 1. Otherwise an id that a policy made up would have all
        ids of a large corpus read."""
        sample = [int(row) for row in np.unique(np.linspace(0, len(self._corpus) - 1, _SAMPLED_ROWS).astype(np.int64))]
        ids = [self._corpus[row]["id"] for row in sample]
        return any(ids == [str(row + first) for row in sample] for first in (0, 1))

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if self._rows_of_ids is None:
                digests = np.empty(len(self._corpus), dtype=np.uint64)
                with Progress("read ids", len(self._corpus), unit="rows") as progress:
                    for row, passage in enumerate(self._corpus):
                        digests[row] = _digest(passage["id"])
                        # Reading may take minutes, and a server that stops must not wait for the end of it.
                        if row % 10_000 == 0:
                            progress.reach(row)
                            if self._closed:
                                raise CorpusError("the server is stopping; its ids are not read to the end")
                # A stable sort keeps rows with the same id in the order of the corpus, so the first of them is found.
                rows = np.argsort(digests, kind="stable")
                self._rows_of_ids = digests[rows], rows
            return self._rows_of_ids


def _digest(name: Any) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(str(name).encode("utf-8", "replace"), digest_size=8).digest(), "big"))
