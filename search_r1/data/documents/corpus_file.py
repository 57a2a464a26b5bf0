"""Write the passages of documents as a corpus, with a report of every file.

A passage of page 3 of a PDF, and one of a Markdown file with a title:

    {"id": "a/b.pdf#page=3&part=1", "contents": "\\"a/b.pdf, page 3\\"\\n...", "source": "a/b.pdf", "page": 3}
    {"id": "guide.md#part=2", "contents": "\\"Install (guide.md)\\"\\n...", "source": "guide.md"}
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from long_task import Progress
from search_r1.data.documents.finding import PULSE_S, Found
from search_r1.data.documents.passages import WORDS, passages_of
from search_r1.data.documents.reading import (
    TITLE_LENGTH,
    Settings,
    Text,
    UnreadableError,
    check_libraries,
    read_document,
)
from search_r1.errors import CorpusError
from search_r1.search.sanitize import whole_characters
from verl.process.storage import whole_file

_SHOWN_PLACES = 5
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass
class FileReport:
    """How many passages a file gave, and where text of it is missing: places by reason, none for the whole file."""

    file: str
    passages: int = 0
    problems: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """`scan.pdf: pages 1-3, 7: a picture without text`, a line for each reason."""
        return [
            ": ".join([self.file, *([_places(places)] if places else []), reason])
            for reason, places in self.problems.items()
        ]


def write_corpus(found: Found, output: Path, settings: Settings, words: int = WORDS) -> list[FileReport]:
    """Write the passages of the files `found` to `output`, whole or not at all; a report of each file.

    Raises `CorpusError` if there is no passage, `StorageError` if `output` cannot be written.
    """
    check_libraries(list(found.files.values()))
    reports = [FileReport(name, problems={reason: []}) for name, reason in found.left_out.items()]
    with whole_file(output) as staging:
        with (
            gzip.open(staging, "wb") if output.suffix == ".gz" else staging.open("wb") as file,
            Progress("read documents", len(found.files), unit="files", quiet_s=PULSE_S) as progress,
        ):
            for name, path in found.files.items():
                progress.update(0, name)
                reports.append(_write_file(cast(BinaryIO, file), name, path, settings, words, progress))
                progress.update()
        if not any(report.passages for report in reports):
            reasons = "".join(f"\n  {line}" for report in reports[:_SHOWN_PLACES] for line in report.lines())
            raise CorpusError(f"no document has a text that can be read, and {output} is not written{reasons}")
    return reports


def report_of(reports: Sequence[FileReport], found: Found, output: Path, words: int) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "output": str(output),
        "words": words,
        "passages": sum(report.passages for report in reports),
        "files": [
            {"file": report.file, "passages": report.passages, "problems": report.lines()}
            for report in sorted(reports, key=lambda report: report.file)
        ],
        "links_not_followed": found.links,
        "hidden": found.hidden,
    }


def _write_file(
    file: BinaryIO, name: str, path: Path, settings: Settings, words: int, progress: Progress
) -> FileReport:
    """What was read before a file turns out to be broken stays in the corpus, and the report says what is missing."""
    report = FileReport(name)
    texts = read_document(path, settings)
    while True:
        # Only reading is tried: an error of writing ends the whole.
        try:
            text = next(texts, None)
        except UnreadableError as error:
            report.problems[str(error)] = []
            break
        if text is None:
            break
        if text.problem:
            report.problems.setdefault(text.problem, []).append(text.place)
        for row in _rows_of(name, text, words):
            file.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())
            report.passages += 1
        if text.place:
            progress.update(0, f"{name}, {_shown_place(text.place)}")
    if not report.passages and not report.problems:
        report.problems["no text in it"] = []
    return report


def _rows_of(name: str, text: Text, words: int) -> Iterator[dict[str, Any]]:
    source = ", ".join([name, *([_shown_place(text.place)] if text.place else [])])
    own = " ".join(text.title.split())[:TITLE_LENGTH]
    title = f"{own} ({source})" if own else source
    for part, passage in enumerate(passages_of(_CONTROL.sub(" ", text.text), words), start=1):
        place = "&".join(f"{key}={value}" for key, value in [*text.place.items(), ("part", part)])
        row = {"id": f"{name}#{place}", "contents": f'"{title}"\n{passage}', "source": name, **text.place, **text.kept}
        yield whole_characters(row)


def _shown_place(place: dict[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in place.items())


def _places(places: list[dict[str, int]]) -> str:
    """`page 3`, `rows 1-3, 7 and 210 more`."""
    [key] = places[0]
    numbers = [place[key] for place in places]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:_SHOWN_PLACES])
    more = sum(b - a + 1 for a, b in ranges[_SHOWN_PLACES:])
    return f"{key}{'s' if len(numbers) > 1 else ''} {shown}{f' and {more} more' if more else ''}"
