"""What the processes of an engine have printed: vLLM's own errors only say that the cause is above."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from verl.process.by_name import in_words

# Of a line of vLLM's: `(EngineCore pid=7) ERROR 11-26 19:25:51 [core.py:1510] `.
PREFIX = re.compile(r"^(\([\w ]+ pid=\d+\) )?((ERROR|INFO|WARNING) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
CAUSE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b(: .*)?$")
ELSEWHERE = re.compile(r"See (root cause|stack trace)|EngineDead", re.IGNORECASE)  # errors about another one
MOST = 300  # characters of one error


class EngineOutput:
    """What has been written to this process's standard output and error since, by it and by its children.

    Only where these are files, as for a worker of Ray; on a terminal people see it themselves.
    """

    def __init__(self) -> None:
        self._files = {path: path.stat().st_size for path in map(_file_behind, (1, 2)) if path}

    def explain(self, error: BaseException) -> str:
        """The first different errors that were printed, at most two, or else `error`, and where all of it is."""
        found: list[str] = []
        for path, start in self._files.items():
            for line in _lines_since(path, start):
                text = PREFIX.sub("", line).strip()
                if CAUSE.match(text) and not ELSEWHERE.search(text) and text[:MOST] not in found:
                    found.append(text[:MOST])
        where = " and ".join(str(path) for path, start in self._files.items() if path.stat().st_size > start)
        told = "; ".join(found[:2]) or " ".join(in_words(error).split())
        return f"vLLM says: {told}" + f" (all that it printed is in {where})" * bool(where)


def _file_behind(descriptor: int) -> Path | None:
    """The regular file that a descriptor writes to, if it has a name."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
    return path if path.is_file() else None


def _lines_since(path: Path, start: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").splitlines()
