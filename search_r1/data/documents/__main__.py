"""Make a corpus of your own documents: passages that name their source, for the index builder and the server.

    .venv/bin/search-r1 data documents docs/ --output corpus.jsonl

Reads text (.txt, .rst, no suffix), Markdown, HTML, PDF, and rows of CSV, TSV, JSON, JSON lines and Parquet with a
column `text` and perhaps `title`. Folders are read with all folders below them. A passage has about --words words and
ends with a paragraph or a sentence, see search_r1/data/documents/passages.py.

What cannot be read is listed with the reason, here and in the report. Exit status: 0 if every file was read, 3 if the
corpus is written without some file, page or row, 1 if nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from program_end import exit_status
from search_r1.data.documents.corpus_file import FileReport, report_of, write_corpus
from search_r1.data.documents.finding import Found, find_files
from search_r1.data.documents.passages import WORDS
from search_r1.data.documents.reading import Settings
from search_r1.script_help import parser_of
from search_r1.search.manifest import check_not_read, make_folder_of, write_manifest
from verl.process.storage import writing

INCOMPLETE = 3
"""The exit status when the corpus is written, but not all text could be read."""
_OURS = {"id", "contents", "source", "page", "row", "title", "text"}  # keys of a passage that --keep cannot name
_LEAST_WORDS = 10
_SHOWN_LINES = 20
_SHOWN_OF_A_REASON = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)
    return exit_status(lambda: run(arguments), "nothing was written")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ends the process on a wrong one."""
    parser = parser_of(__doc__, "python -m search_r1.data.documents")
    add = parser.add_argument
    add("documents", nargs="+", type=Path, help="folders and files")
    add("--output", required=True, type=Path, help="the corpus, .jsonl or .jsonl.gz")
    add("--report", type=Path, help="what every file gave, as JSON (default: the output's name with .report.json)")
    add("--words", type=int, default=WORDS, help="words of a passage (default: %(default)s)")
    add("--text_column", default="text", help="of rows: the column with the text (default: %(default)s)")
    add("--title_column", help="of rows: the column with the title (default: title, if there is one)")
    add("--keep", nargs="+", default=[], metavar="COLUMN", help="of rows: columns to keep as keys of the passages")
    add("--encoding", help="of text that is not UTF-8, such as cp1252, gb18030 or shift_jis")
    add("--text_suffixes", nargs="+", default=[], metavar="SUFFIX", help="more kinds of text files, such as .log .tex")
    add("--hidden", action="store_true", help="read files and folders whose names begin with a dot, too")
    arguments = parser.parse_args(argv)
    if arguments.words < _LEAST_WORDS:
        parser.error(f"--words {arguments.words} is less than {_LEAST_WORDS}")
    if taken := _OURS & set(arguments.keep):
        parser.error(f"--keep {min(taken)}: a passage has a key of that name")
    if not arguments.output.name.endswith((".jsonl", ".jsonl.gz")):
        parser.error(f"--output {arguments.output} has to be named .jsonl or .jsonl.gz")
    try:
        "".encode(arguments.encoding or "utf-8")
    except LookupError:
        parser.error(f"--encoding {arguments.encoding} is unknown to Python")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Write corpus and report; returns the exit status. Raises `SearchError` or `StorageError`."""
    output = arguments.output
    report_path = arguments.report or output.with_name(output.name + ".report.json")
    # What cannot be written to is refused before the documents are read, which takes long.
    for option, path in (("--output", output), ("--report", report_path)):
        check_not_read(option, path, [path for path in arguments.documents if path.is_file()])
        make_folder_of(option, path)
    suffixes = tuple(f".{suffix.lower().removeprefix('.')}" for suffix in arguments.text_suffixes)
    settings = Settings(
        arguments.title_column, arguments.text_column, tuple(arguments.keep), arguments.encoding, suffixes
    )
    # The results may lie in a folder that is read: those of an earlier run are no documents.
    found = find_files(arguments.documents, arguments.hidden, not_read=[output, report_path])
    reports = write_corpus(found, output, settings, arguments.words)
    report = report_of(reports, found, output, arguments.words)
    with writing(report_path):
        write_manifest(report_path, report)
    return _tell(reports, found, report["passages"], output, report_path)


def _tell(reports: Sequence[FileReport], found: Found, num_passages: int, output: Path, report_path: Path) -> int:
    unread = [report for report in reports if not report.passages]
    partly = [report for report in reports if report.passages and report.problems]
    # What is missing, to standard error.
    lines = [f"not read: {line}" for line in _grouped(unread)]
    lines += [f"not all read: {line}" for report in partly for line in report.lines()]
    for line in lines[:_SHOWN_LINES]:
        print(line, file=sys.stderr)
    if len(lines) > _SHOWN_LINES:
        print(f"... and {len(lines) - _SHOWN_LINES} more, in {report_path}", file=sys.stderr)
    # What is there, to standard output.
    num_read = len(reports) - len(unread)
    print(f"{output}: {num_passages} passages from {num_read} of {len(reports)} files; report: {report_path}")
    if found.hidden:
        print(f"{len(found.hidden)} hidden files and folders not read (--hidden reads them)")
    if found.links:
        print(f"{len(found.links)} links not followed, to what is read anyway or to a folder above")
    if unread or partly:
        print(f"{len(unread)} files not read, {len(partly)} read in part", file=sys.stderr)
        return INCOMPLETE
    return 0


def _grouped(unread: Sequence[FileReport]) -> Iterator[str]:
    """A line for each file; one for all files that have the same reason, where they are many."""
    by_reason: dict[str, list[FileReport]] = {}
    for report in unread:
        by_reason.setdefault("; ".join(report.problems), []).append(report)
    for reason, reports in by_reason.items():
        if len(reports) > _SHOWN_OF_A_REASON:
            yield f"{len(reports)} files, such as {reports[0].file}: {reason}"
        else:
            yield from (line for report in reports for line in report.lines())


if __name__ == "__main__":
    sys.exit(main())
