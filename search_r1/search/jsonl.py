"""JSON-lines files read once, in order, in constant memory, with a progress bar."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from long_task import reading
from search_r1.errors import CorpusError
from search_r1.search.sanitize import whole_characters


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes with the newline) of each line of a `.jsonl` or `.jsonl.gz` file. Raises `CorpusError`."""
    if not path.is_file():
        raise CorpusError(f"{path} does not exist; pass a .jsonl or .jsonl.gz file")
    with reading(path) as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
        except (EOFError, zlib.error, OSError) as error:
            raise CorpusError(f"{path} cannot be read after line {number}: {error}; fetch the file again") from error
    if number == 0:
        raise CorpusError(f"{path} is empty; pass a .jsonl or .jsonl.gz file with rows")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, decoded JSON object) of each line, U+FFFD for half characters. Raises `CorpusError`."""
    for number, line in read_lines(path):
        try:
            value = whole_characters(json.loads(line))
        except (ValueError, RecursionError) as error:
            reason = f"{error}" if line.strip() else "blank line"
            raise CorpusError(f"{path}, line {number}: {reason}; each line must be a JSON object") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise CorpusError(f"{path}, line {number}: a JSON {kind}; each line must be a JSON object")
        yield number, value
