"""Show which gold answers a corpus contains, or add the missing gold passages to it.

.venv/bin/python -m search_r1.search.corpus_tool audit --corpus_path corpus.jsonl --questions nq/test.jsonl
.venv/bin/python -m search_r1.search.corpus_tool complete --corpus_path corpus.jsonl \\
    --questions hotpotqa/dev.jsonl --add gold.jsonl --output completed.jsonl
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program_end import exit_status
from search_r1.data.corpus.audit import audit, write_details
from search_r1.data.corpus.gold_completion import complete
from search_r1.data.corpus.subsets import SHARES, SPLITS, write_subsets
from search_r1.search.manifest import check_not_read, check_takes_files, make_folder_of, write_manifest
from verl.process.storage import nearest_folder, writing


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of `audit` or `complete`."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.corpus_tool",
        description="Find out which gold answers a corpus holds, and add the gold passages that are missing.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser(
        "audit", help="count the questions whose gold answer is in the corpus, or is retrieved"
    )
    adds = commands.add_parser("complete", help="write the corpus together with the gold passages that it lacks")
    # what both commands read
    for command in (checks, adds):
        command.add_argument("--corpus_path", required=True, type=Path, help="passages, .jsonl or .jsonl.gz")
        command.add_argument(
            "--questions",
            nargs="+",
            type=Path,
            default=[],
            required=command is checks,
            help="files in FlashRAG's format",
        )
    # audit: where to look, and where the results go
    checks.add_argument("--url", help="/retrieve of a running server; without it, only the corpus is searched")
    checks.add_argument(
        "--k", type=_ks, default=[1, 3, 5, 20], help="numbers of passages for recall@k, such as 1,3,5,20"
    )
    checks.add_argument("--output", type=Path, help="write the counts as JSON")
    checks.add_argument("--details", type=Path, help="write the questions not covered or not found, as JSON lines")
    checks.add_argument("--subsets", type=Path, help="with --url: folder for the answerable questions, by split")
    checks.add_argument("--subset_k", type=_count, default=3, help="passages of a search for --subsets (default: 3)")
    checks.add_argument("--subset_shares", type=_shares, default=SHARES, metavar="TRAIN,VALIDATION,TEST",
                        help="of the answerable questions (default: 0.8,0.1,0.1)")  # fmt: skip
    # complete: what to add, and where the new corpus goes
    adds.add_argument("--add", nargs="+", type=Path, default=[], help="files of gold passages")
    adds.add_argument("--output", required=True, type=Path, help="the new corpus, .jsonl or .jsonl.gz")
    adds.add_argument(
        "--report", type=Path, help="JSON report of what was added (default: the output's name with .report.json)"
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "complete" and not arguments.questions + arguments.add:
        adds.error("--add or --questions is needed: a file with gold passages")
    if arguments.command == "audit" and arguments.subsets and not arguments.url:
        checks.error("--subsets needs --url: what can be answered depends on what a server finds")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    run = _audit if arguments.command == "audit" else _complete
    return exit_status(lambda: run(arguments), "files that were not named are not written")


def _audit(arguments: argparse.Namespace) -> None:
    # What cannot be written to is refused before the corpus is read, which takes long.
    for option, path in (("--output", arguments.output), ("--details", arguments.details)):
        check_not_read(option, path, [arguments.corpus_path, *arguments.questions])
        if path:
            make_folder_of(option, path)
    if arguments.subsets:
        with writing(arguments.subsets):
            check_takes_files(nearest_folder(arguments.subsets))
    done = audit(arguments.corpus_path, arguments.questions, arguments.url, arguments.k)
    if arguments.output:
        with writing(arguments.output):
            write_manifest(arguments.output, done.report)
    if arguments.details:
        with writing(arguments.details):
            write_details(arguments.details, done.details)
    print(f"{done.report['passages']} passages in {arguments.corpus_path}")
    rows = [*done.report["files"], {"file": "all"} | done.report["total"]]
    print("\n".join(table([_audit_cells(row) for row in rows])))
    if arguments.subsets:
        how = {"k": arguments.subset_k, "shares": arguments.subset_shares}
        counts = write_subsets(
            arguments.corpus_path, arguments.url, arguments.questions, folder=arguments.subsets, **how
        )
        print(f"{arguments.subsets}: answerable questions")
        print("\n".join(table(counts)))


def _complete(arguments: argparse.Namespace) -> None:
    path = arguments.report or arguments.output.with_name(arguments.output.name + ".report.json")
    # What cannot be written to is refused before the corpus is read, which takes long.
    check_not_read("--report", path, [arguments.corpus_path, *arguments.add, *arguments.questions])
    for option, target in (("--output", arguments.output), ("--report", path)):
        make_folder_of(option, target)
    report = complete(arguments.corpus_path, arguments.add, arguments.questions, arguments.output)
    with writing(path):
        write_manifest(path, report)
    print(f"{report['rows_added']} passages added to {report['rows_before']}: {arguments.output}; report: {path}")
    print("\n".join(table(report["sources"])))
    changes = [
        {"file": row["file"], "span": row["before"]["span"]}
        | {when: _percent(row[when]["coverage"]) for when in ("before", "after")}
        for row in report["coverage"]
    ]
    print("\n".join(table(changes)))


def _audit_cells(row: dict[str, Any]) -> dict[str, Any]:
    cells = {key: row[key] for key in ("file", "questions", "yes_no", "empty", "span", "covered")}
    cells["coverage"] = _percent(row["coverage"])
    for k, found in row.get("recall", {}).items():
        cells[f"recall@{k}"] = f"{_percent(found['of_all'])} ({_percent(found['of_covered'])})"
    return cells


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table; its columns are the keys of all rows, in order; a missing value is left empty."""
    if not rows:
        return []
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [head, *([str(row.get(key, "")) for key in head] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in cells]
    return [lines[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *lines[1:]]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: passages are counted from 1")
    return int(text)


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) for part in text.split(","))
    if len(shares) != len(SPLITS) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise argparse.ArgumentTypeError(f"{text}: three shares that add up to 1, such as 0.8,0.1,0.1")
    return shares


def _ks(text: str) -> list[int]:
    ks = sorted({int(part) for part in text.split(",")})
    if ks[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: passages are counted from 1")
    return ks
