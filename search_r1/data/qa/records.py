"""The rows of a file: JSON lines, a JSON array, CSV, TSV (each may be gzipped), or Parquet."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from long_task import reading, track
from search_r1.data.qa.tables import TableRow, table_rows
from search_r1.errors import CorpusError
from search_r1.search.jsonl import read_lines, why_no_json
from text_file import no_file, not_utf8
from verl.errors import DataError

_SPACE = re.compile(r"\s*")
_NUMBER_CUT = re.compile(r"[-+.\deE]*\Z")  # what is read of a text may end in the middle of a number
_BLOCK = 1 << 20
_ROWS_A_BATCH = 1024  # a row with its context is some 10 KB
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class FileRow:
    """One row: its `value`, or the reason why it has none. `line` counts from 1; in Parquet, rows from 0."""

    line: int
    value: dict[str, Any] = field(default_factory=dict)
    fault: str = ""


def read_records(path: Path, encoding: str = "utf-8-sig") -> Iterator[FileRow]:
    """The rows in order. Raises `DataError` if the file cannot be read any further (a broken row is a `fault`).

    `encoding` is that of a JSON array or a table; JSON lines are UTF-8.
    """
    kind = kind_of(path)
    if kind not in _READERS:
        raise DataError(f"{path}: is none of {', '.join(_READERS)} (text also with .gz)")
    if reason := no_file(path):
        raise DataError(f"{path} {reason}")
    yield from _READERS[kind](path, encoding)


def kind_of(path: Path) -> str:
    """The suffix in lower case, without `.gz`: `.csv` for `Rows.CSV.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def place(path: Path, line: int) -> str:
    """The location of a record, for messages."""
    return f"{path}: row {line}" if kind_of(path) == ".parquet" else f"{path}:{line}"


def _json_lines(path: Path, _: str) -> Iterator[FileRow]:
    try:
        for number, line in read_lines(path):
            yield _json_line(number, line)
    except CorpusError as error:
        raise DataError(str(error)) from error


def _json_line(number: int, line: bytes) -> FileRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return FileRow(number, fault=f"no JSON: {why_no_json(line, error)}" if line.strip() else "a blank line")
    return _object(number, value)


def _object(number: int, value: Any) -> FileRow:
    if not isinstance(value, dict):
        return FileRow(number, fault=f"a JSON {type(value).__name__}, not an object")
    return FileRow(number, value)


def _json_array(path: Path, encoding: str) -> Iterator[FileRow]:
    with _text(path, encoding) as file:
        try:
            for line, value in array_items(file):
                yield _object(line, value)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno}: no JSON array of rows: {error.msg}; a file with an object on each line is "
                f"named .jsonl"
            ) from error


def _table(path: Path, encoding: str, delimiter: str) -> Iterator[FileRow]:
    names: Sequence[str] = ()
    with _text(path, encoding) as file:
        for row in table_rows(file, delimiter):
            # The first row names the columns: without it no other row can be read, while a fault in another costs one
            # row.
            if not names:
                names = _column_names(path, row)
            elif row.fault:
                yield FileRow(row.line, fault=row.fault)
            else:
                yield FileRow(row.line, dict(zip(names, row.cells, strict=True)))


def _column_names(path: Path, row: TableRow) -> Sequence[str]:
    if row.fault:
        raise DataError(f"{path}:{row.line}: the names of the columns cannot be read: {row.fault}")
    # Spreadsheets write empty columns without a name, often several.
    twice = next((name for name in row.cells if name and row.cells.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}:{row.line}: several columns have the name {twice!r:.100}; rename all but one of them")
    return row.cells


def _parquet(path: Path, _: str) -> Iterator[FileRow]:
    number = 0
    try:
        with path.open("rb") as opened:  # by its name pyarrow opens only what is UTF-8
            file = pq.ParquetFile(opened)
            rows = (row for batch in file.iter_batches(_ROWS_A_BATCH) for row in batch.to_pylist())
            for number, row in enumerate(track(rows, f"read {path.name}", file.metadata.num_rows, "rows")):
                yield FileRow(number, row)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    except (OverflowError, ValueError) as error:  # such as a date that Python does not have
        raise DataError(
            f"{path}: a value after row {number} cannot be read: {error}; write dates and times as texts"
        ) from error


@contextmanager
def _text(path: Path, encoding: str) -> Iterator[TextIO]:
    """The file, open as text. Raises `DataError` in place of an error of reading, also in the block."""
    try:
        with reading(path) as raw, gzip.open(raw) if path.suffix.lower() == ".gz" else nullcontext(raw) as plain:
            yield io.TextIOWrapper(cast(io.BufferedReader, plain), encoding=encoding, newline="")
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(path)) from error
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: no permission; allow reading it") from error
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch the file again") from error


_READERS: dict[str, Callable[[Path, str], Iterator[FileRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"),
    ".parquet": _parquet,
}


# Stream the items of a JSON array: HotpotQA and TriviaQA come as one array of gigabytes.


def array_items(file: TextIO) -> Iterator[tuple[int, Any]]:
    """(line from 1, value) of each item of `[...]`, or of the only array of `{"Data": [...], "Version": 1.0}`.

    Raises `json.JSONDecodeError` with the `lineno` of the file, also for what would not be read: a second array, an
    object, or text behind the end.
    """
    window = _Window(file)
    if window.peek() == "{":
        yield from _only_array(window)
    else:
        yield from _items(window)
    if window.peek():
        raise window.error("more follows the end of the array or object, and would not be read: make one array of it")


def _only_array(window: _Window) -> Iterator[tuple[int, Any]]:
    """The items of the array in an object whose other values are neither arrays nor objects."""
    window.take("{")
    found = False
    while True:
        key = window.decode()
        window.take(":")
        opening = window.peek()
        if opening == "[" and not found:
            found = True
            yield from _items(window)
        elif opening in ("[", "{"):
            what = "an array" if opening == "[" else "an object"
            raise window.error(
                f"{key!r:.100} has {what}, which would not be read: only one array, of the rows, and plain values may "
                "be in the object; write an array of all rows, or each array to a file of its own"
            )
        else:
            window.decode()
        if window.peek() != ",":
            break
        window.take(",")
    window.take("}")
    if not found:
        raise window.error("the object has no array")


def _items(window: _Window) -> Iterator[tuple[int, Any]]:
    window.take("[")
    while window.peek() != "]":
        yield window.line, window.decode()
        if window.peek() != "]":
            window.take(",")
    window.take("]")


class _Window:
    """The part of the text that is being parsed."""

    def __init__(self, file: TextIO) -> None:
        self.line = 1
        self._file = file
        self._text = ""
        self._at = 0

    def peek(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._advance(space.end())
            if self._at < len(self._text) or not self._read(_BLOCK):
                return self._text[self._at : self._at + 1]

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise self.error(f"expecting {character!r}")
        self._advance(self._at + 1)

    def decode(self) -> Any:
        self.peek()
        size = _BLOCK
        # The value may go on beyond the text read so far. It is parsed from its beginning after each block, so blocks
        # double: a large value costs few attempts.
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Counted before the text is moved by reading on: the position of the error belongs to this one.
                lines_further = self._text.count("\n", self._at, error.pos)
                if not self._read(size):
                    raise self.error(error.msg, lines_further) from error
                size *= 2
                continue
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
                raise self.error(str(error)) from error
            length = end - self._at
            if _NUMBER_CUT.match(self._text, end) and self._read(size):
                continue
            self._advance(self._at + length)
            return value

    def _read(self, size: int) -> bool:
        block = self._file.read(size)
        self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def error(self, reason: str, lines_further: int = 0) -> json.JSONDecodeError:
        """The error for what stands here, or some lines further on."""
        error = json.JSONDecodeError(reason, self._text, self._at)
        error.lineno = self.line + lines_further
        return error
