"""Which phases of a script need not be run again: those whose command, inputs and results are as they were then.

    python -m verl.run.finished_phase check RECORD --inputs FILE... --results FOLDER... -- COMMAND...
    python -m verl.run.finished_phase record RECORD --inputs FILE... --results FOLDER... -- COMMAND...

`record` writes the digests of all files to the file RECORD, once COMMAND has ended well. `check` prints `unchanged` if
everything is still the same, else nothing; what differs goes to the log.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program_end import exit_status
from verl.errors import DataError
from verl.process.startup import PLAIN, log_to_stderr
from verl.process.storage import digest, whole_file

UNCHANGED = "unchanged"
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `exit_status` says."""
    parser = argparse.ArgumentParser(prog="python -m verl.run.finished_phase", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("record", type=Path, help="file that describes the finished phase")
    parser.add_argument("--inputs", type=Path, nargs="+", required=True, help="files and folders that the phase reads")
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="files and folders that it writes")
    # What follows `--` is the command of the phase, whose options are not for this parser.
    words = sys.argv[1:] if argv is None else list(argv)
    place = words.index("--") if "--" in words else len(words)
    args, command = parser.parse_args(words[:place]), words[place + 1 :]
    log_to_stderr(PLAIN)

    def act() -> None:
        if args.action == "check":
            print(UNCHANGED if is_finished(args.record, command, args.inputs, args.results) else "", end="")
            return
        found = description(command, args.inputs, args.results)
        if not found["results"]:
            raise DataError(f"the phase '{args.record.stem}' ended well, but {args.results[0]} holds nothing")
        with whole_file(args.record) as temporary:
            temporary.write_text(json.dumps(found, indent=1))

    return exit_status(act, when_interrupted="nothing was written")


def is_finished(record: Path, command: Sequence[str], inputs: Sequence[Path], results: Sequence[Path]) -> bool:
    """Whether `record` describes this command with these inputs, and its results are there as they were.

    Files that were added to the results since then do not matter. Logs what differs; without a record, nothing.
    """
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    now = description(command, inputs, results)
    now["results"] = {file: found for file, found in now["results"].items() if file in before["results"]}
    if differing := [part for part in now if now[part] != before.get(part)]:
        log.info("%s: %s, so it is run again", record.stem, _in_words(before, now, differing[0]))
    return not differing


def description(command: Sequence[str], inputs: Sequence[Path], results: Sequence[Path]) -> dict[str, Any]:
    """A phase: its command, and the size and SHA-256 of each file that it reads and writes."""
    return {"command": list(command), "inputs": _digests(inputs), "results": _digests(results)}


def _digests(paths: Sequence[Path]) -> dict[str, list[int | str]]:
    files = (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))))
    read = (file for file in files if file.is_file() and "__pycache__" not in file.parts)
    return {str(file): list(digest(file)) for file in read}


def _in_words(before: dict[str, Any], now: dict[str, Any], part: str) -> str:
    if part == "command":
        return "its settings have changed"
    old, new = before.get(part) or {}, now[part]
    file = next(name for name in [*new, *old] if new.get(name) != old.get(name))
    return f"{file} has changed since it was finished" if file in new else f"{file} is gone"


if __name__ == "__main__":
    sys.exit(main())
