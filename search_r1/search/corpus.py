"""A passage corpus on disk: one JSON object per line, read by row number without keeping the text in memory.

Row schema: `{"id": "0", "contents": "\\"Title\\"\\ntext", ...}`. A row without `contents` but with `text` (and perhaps
`title`) is read as `"title"\\ntext`; a title that is null is none, and one that is a number is its digits. Further keys
are kept. In any text of a row, half a surrogate pair is read as U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from long_task import BYTES, Progress
from search_r1.errors import CorpusError
from search_r1.search.jsonl import open_plain_copy, why_no_json
from search_r1.search.sanitize import strip_agent_tags, title_of, whole_characters
from text_file import no_file

OWN_DOCUMENTS = (
    "For CSV, JSON, PDF, HTML, Markdown or text: .venv/bin/search-r1 data documents FOLDER --output corpus.jsonl"
)
_SCAN_BYTES = 1 << 24
_SAMPLED_ROWS = 1024


class Corpus:
    """Random access to the passages of a `.jsonl` or `.jsonl.gz` file. Row r is line r + 1 of the file.

    Rows are read, not memory-mapped: in time, all pages of a mapped file would count as memory of this process.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the lines of the file and parse a sample of them. Raises `CorpusError`.

        Takes 8 bytes of memory per row and one sequential read of the file. `checksum` is the CRC-32 of the whole file;
        `digest`, by which an index identifies its corpus, covers a sample.
        """
        self.path = Path(path)
        if reason := no_file(self.path):
            raise CorpusError(f"corpus file {self.path} {reason}; pass a .jsonl file by --corpus_path. {OWN_DOCUMENTS}")
        self._file = open_plain_copy(self.path) if self.path.suffix.lower() == ".gz" else _opened(self.path)
        if os.fstat(self._file.fileno()).st_size == 0:
            raise CorpusError(f"corpus file {self.path} is empty")
        self._starts, self.checksum = _line_starts(self._file)
        self.digest = self._sample_digest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The passage of `row`: always with `id` and `contents`, agent tags stripped. Raises `CorpusError`."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside corpus {self.path} of {len(self)} rows")
        return parse_passage(self._line(row), self.path, row + 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def _line(self, row: int) -> bytes:
        start, end = self._starts[row : row + 2].tolist()
        return os.pread(self._file.fileno(), end - start, start)

    def _sample_digest(self) -> str:
        """SHA-256 over the row count, the byte count and up to 1,024 evenly spaced rows.

        Tells corpora apart without hashing all of a large file; a change inside a row that is not sampled and keeps
        the file's size goes unseen.
        """
        digest = hashlib.sha256(f"{len(self)} {self._starts[-1]}".encode())
        for row in np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64)):
            line = self._line(int(row))
            parse_passage(line, self.path, int(row) + 1)
            digest.update(line)
        return digest.hexdigest()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"corpus file {path} cannot be read: {error.strerror or error}") from error


def parse_passage(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The passage on line `number` (from 1) of the corpus `path`, as `Corpus` gives it. Raises `CorpusError`."""
    try:
        return _passage(whole_characters(json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f'{path}, line {number}: {why_no_json(line, error)}; each line must be {{"id": "...", "contents": "..."}} '
            f'or {{"id": "...", "title": "...", "text": "..."}}. {OWN_DOCUMENTS}'
        ) from error


def passage_contents(row: dict[str, Any]) -> str:
    """`contents` of a decoded row, or title and text joined, agent tags stripped. Raises `ValueError`."""
    return strip_agent_tags(_contents(row))


def is_quoted(line: str) -> bool:
    """Whether a line stands in quotation marks, as the title of a passage does."""
    line = line.strip()
    return len(line) > 1 and line[0] == line[-1] == '"'


def title_line_and_text(contents: str) -> tuple[str, str]:
    """The first line of contents, which is its title and keeps its quotes, and the text after it.

    A single line is a text without a title, unless it is quoted.
    """
    line, newline, text = contents.partition("\n")
    return (line, text) if newline or is_quoted(line) else ("", contents)


def title_and_text(contents: str) -> tuple[str, str]:
    """The title and the text of contents in the form `"Title"\\ntext`, as `title_line_and_text`, without the quotes."""
    line, text = title_line_and_text(contents)
    return line.strip().strip('"'), text


def _passage(value: Any) -> dict[str, Any]:
    """Check one decoded row. Raises `ValueError` with the reason."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    identifier = value.get("id")
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise ValueError("no 'id' (a string)")
    contents = passage_contents(value)
    others = {key: strip_agent_tags(item) if isinstance(item, str) else item for key, item in value.items()}
    return others | {"id": str(identifier), "contents": contents}


def _contents(value: dict[str, Any]) -> str:
    contents = value.get("contents")
    if isinstance(contents, str):
        return contents
    if contents is not None:
        raise ValueError(f"'contents' is a {type(contents).__name__}, not a string")
    text, title = value.get("text"), title_of(value.get("title"))
    if not isinstance(text, str):
        raise ValueError("no 'contents' (a string)")
    return text if title is None else f'"{title}"\n{text}'


def _line_starts(file: BinaryIO) -> tuple[np.ndarray, int]:
    """Byte offsets of the lines, int64 [rows + 1]; the last one is the end of the last line. And the CRC-32 of all."""
    ends, size, checksum = [np.zeros(1, dtype=np.int64)], 0, 0
    with Progress("find lines", os.fstat(file.fileno()).st_size, unit=BYTES) as progress:
        while block := file.read(_SCAN_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + size + 1)
            size += len(block)
            checksum = zlib.crc32(block, checksum)
            progress.reach(size)
    starts = np.concatenate(ends)
    return (starts if starts[-1] == size else np.append(starts, size)), checksum
