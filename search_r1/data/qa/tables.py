"""The rows of a CSV or TSV file, in which a cell has any length and a broken row does not hide the rows after it.

CSV is RFC 4180: a cell that begins with a quotation mark ends with one, and those inside it are doubled. TSV is written
both with such cells (pandas, spreadsheets) and without any quoting, so there a quotation mark that does not begin a
whole quoted cell is a character like any other: `"Heroes" (album)`. A quoted cell of TSV spans several lines only if it
has no tab: otherwise one mark without its partner would turn many rows into one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_INSIDE = re.compile(r'[^"]*+(?:""[^"]*+)*+')
_LINE_ENDS = "\r\n"
_LONGEST_CELL = 1 << 24  # characters of a cell of several lines, after which its end is not looked for any more


@dataclass(frozen=True)
class TableRow:
    """`line` counts from 1, and is the first of several. `fault`: the reason why there are no `cells`."""

    line: int
    cells: Sequence[str] = ()
    fault: str = ""


def table_rows(lines: Iterator[str], delimiter: str) -> Iterator[TableRow]:
    """The rows of `lines` (with their ends), blank ones left out; each has as many cells as the first one."""
    reader = _Reader(lines, delimiter)
    width: int | None = None
    while reader.has_line():
        row = reader.row(width)
        if row is not None:
            width = width or len(row.cells)
            yield row


class _Reader:
    """Reads row by row, and puts lines back that turn out to be no part of a row."""

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self._lines, self._delimiter = lines, delimiter
        self._put_back: deque[str] = deque()
        self._taken: list[str] = []  # the lines of the row that is being read
        self._line = 0

    def has_line(self) -> bool:
        if not self._put_back:
            self._put_back.extend(line for line in [next(self._lines, "")] if line)
        return bool(self._put_back)

    def row(self, width: int | None) -> TableRow | None:
        """The next row, None for a blank line."""
        self._taken, number = [], self._line + 1
        line = self._take()
        if '"' not in line:
            plain = line.rstrip(_LINE_ENDS)
            return self._checked(number, plain.split(self._delimiter), width) if plain else None
        try:
            cells = self._cells(line)
        except ValueError as error:
            self._keep_first()
            return TableRow(number, fault=str(error))
        if self._delimiter == "\t" and width not in (None, len(cells)):
            # with every quotation mark as a character, the line may be a row
            plain_cells = self._taken[0].rstrip(_LINE_ENDS).split("\t")
            if len(plain_cells) == width:
                self._keep_first()
                cells = plain_cells
        return self._checked(number, cells, width)

    def _checked(self, number: int, cells: list[str], width: int | None) -> TableRow:
        if width in (None, len(cells)):
            return TableRow(number, cells)
        lines = len(self._taken)
        self._keep_first()
        over = f" (in a quoted cell, over {lines} lines)" if lines > 1 else ""
        return TableRow(
            number, fault=f"it has not as many columns as the first line: {len(cells)}{over}, which has {width}"
        )

    def _cells(self, line: str) -> list[str]:
        """The cells of the row that begins with `line`. Raises `ValueError` with the reason why they cannot be told."""
        cells, at = [], 0
        while True:
            # one cell, which may take further lines
            if line.startswith('"', at):
                cell, line, at = self._quoted(line, at)
            else:
                cell, at = self._unquoted(line, at)
            cells.append(cell)
            if line[at : at + 1] != self._delimiter:
                return cells
            at += 1

    def _unquoted(self, line: str, at: int) -> tuple[str, int]:
        end = line.find(self._delimiter, at)
        end = len(line.rstrip(_LINE_ENDS)) if end < 0 else end
        return line[at:end], end

    def _quoted(self, line: str, at: int) -> tuple[str, str, int]:
        """(the cell that begins at `at`, the line in which it ends, where). Raises `ValueError` as `_cells`."""
        pieces: list[str] = []
        here, start, length, taken = line, at + 1, 0, len(self._taken)
        while True:
            inside = _INSIDE.match(here, start)
            assert inside is not None
            pieces.append(inside[0])
            start, length = inside.end(), length + len(inside[0])
            tabbed = self._delimiter == "\t" and "\t" in inside[0]
            if start < len(here) or tabbed or length > _LONGEST_CELL or not self.has_line():
                break
            here, start = self._take(), 0
        # A whole quoted cell is closed, and nothing but the end of the cell follows.
        closed = start < len(here) and not (tabbed and len(pieces) > 1)
        follows = here[start + 1 : start + 2]
        if closed and follows in ("", self._delimiter, "\r", "\n"):
            return "".join(pieces).replace('""', '"'), here, start + 1
        self._put_back_from(taken)
        if self._delimiter == "\t":
            cell, end = self._unquoted(line, at)
            return cell, line, end
        raise ValueError(
            'a quoted cell ends in the middle: write a quotation mark inside quotation marks twice ("")'
            if closed
            else 'a quotation mark begins a cell and none ends it: close it, or write the cell as """..."'
        )

    # Lines: taken for the row in hand, or put back.

    def _take(self) -> str:
        line = self._put_back.popleft() if self._put_back else next(self._lines)
        self._taken.append(line)
        self._line += 1
        return line

    def _put_back_from(self, kept: int) -> None:
        self._put_back.extendleft(reversed(self._taken[kept:]))
        self._line -= len(self._taken) - kept
        del self._taken[kept:]

    def _keep_first(self) -> None:
        self._put_back_from(1)
