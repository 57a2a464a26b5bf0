"""Read the validated questions of one file, in any known format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from search_r1.data.qa.formats import Format, format_of, known_formats
from search_r1.data.qa.question import QaRow, checked
from search_r1.data.qa.records import FileRow, place, read_records
from verl.errors import DataError

_LOOKED_AT = 100  # rows that may be broken before one that shows the format


@dataclass
class BadRows:
    """The policy for invalid rows: raise an error at the first, or list all of them and skip them."""

    skip: bool = False
    listed: list[str] = field(default_factory=list)

    def found(self, where: str, reason: str) -> None:
        """Register an invalid row. Raises `DataError` unless they are skipped."""
        if not self.skip:
            raise DataError(f"{where}: {reason}; correct the row, or leave such rows out by --skip_bad_rows")
        self.listed.append(f"{where}: {reason}")


def read_questions(path: Path, split: str, bad_rows: BadRows) -> Iterator[QaRow]:
    """The questions of `path`, in file order. `split` goes into the ids of rows whose format has none.

    Raises `DataError` with file and line: for a file that cannot be read or has no known format, and, unless `bad_rows`
    skips them, for a row without a question or gold answers, with a wrong type, or with a repeated id.
    """
    records = read_records(path)
    first = list(islice(records, _LOOKED_AT))
    found = _format(path, first)
    line_of_id: dict[str, int] = {}
    for index, record in enumerate(chain(first, records)):
        try:
            row = _question(record, found, split, index)
            if row.id in line_of_id:
                unit = "row" if path.suffix == ".parquet" else "line"
                raise ValueError(f"the id {row.id!r} stands already in {unit} {line_of_id[row.id]}")
        except ValueError as error:
            bad_rows.found(place(path, record.line), str(error))
            continue
        line_of_id[row.id] = record.line
        yield row


def _format(path: Path, first: list[FileRow]) -> Format:
    if not first:
        raise DataError(f"{path} has no rows")
    found = format_of(record.value for record in first)
    if found is None:
        shown = next((record for record in first if not record.fault), first[0])
        what = shown.fault or f"a row with the keys {', '.join(map(str, shown.value))}"
        raise DataError(
            f"{place(path, shown.line)}: {what}; rows of your own need question and answer; known formats (with "
            f"the keys they need) are {known_formats()}"
        )
    return found


def _question(record: FileRow, found: Format, split: str, index: int) -> QaRow:
    """The question in a row of the format `found`. Raises `ValueError` with the reason if there is none."""
    if record.fault:
        raise ValueError(record.fault)
    missing = sorted(found.keys - record.value.keys())
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return checked(found.read(record.value), split, index)
