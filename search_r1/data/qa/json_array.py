"""Stream the items of a JSON array: HotpotQA and TriviaQA come as one array of gigabytes.

Why not ijson: its items have no line numbers, which every error about a row contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

_SPACE = re.compile(r"\s*")
_BLOCK = 1 << 20
_DECODER = json.JSONDecoder()


def array_items(file: TextIO) -> Iterator[tuple[int, Any]]:
    """(line from 1, value) of each item of `[...]`, or of the array under the first key of `{"Data": [...]}`.

    Anything after that array is not read. Raises `json.JSONDecodeError` with the `lineno` of the file.
    """
    window = _Window(file)
    if window.peek() == "{":
        window.take("{")
        window.decode()
        window.take(":")
    window.take("[")
    while window.peek() != "]":
        yield window.line, window.decode()
        if window.peek() != "]":
            window.take(",")


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
            raise self._error(f"expecting {character!r}")
        self._advance(self._at + 1)

    def decode(self) -> Any:
        self.peek()
        size = _BLOCK
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                lines_further = self._text.count("\n", self._at, error.pos)
                if not self._read(size):
                    raise self._error(error.msg, lines_further) from error
                size *= 2
                continue
            self._advance(end)
            return value

    def _read(self, size: int) -> bool:
        block = self._file.read(size)
        self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _error(self, reason: str, lines_further: int = 0) -> json.JSONDecodeError:
        error = json.JSONDecodeError(reason, self._text, self._at)
        error.lineno = self.line + lines_further
        return error
