"""A program on a terminal of its own: what it sends there, and what can then be read there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

from e2e_world import ENV, ROOT
from watched_run import WatchedRun

CTRL_C = b"\x03"
ROWS = 40
PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b.?|[\x00-\x1a\x1c-\x1f]|[^\x00-\x1f]+", re.DOTALL)
OTHERS = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}  # variables that say something else of the terminal


class TerminalRun(WatchedRun):
    """`arguments` of Python, run in the foreground of a terminal as by a shell; what is sent there is in `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, columns: int) -> None:
        super().__init__(log)
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        environment = {name: value for name, value in ENV.items() if name not in OTHERS} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            **{"stdin": other, "stdout": other, "stderr": other, "cwd": ROOT, "env": environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that keys are signals to its group
        )
        os.close(other)
        log.touch()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def end(self, timeout_s: float = 1200) -> int:
        """The exit status, when all that it sent has been read."""
        try:
            status = self.process.wait(timeout_s)
            self._reader.join(60)
            assert not self._reader.is_alive(), "a process that it started still has the terminal"
            return status
        finally:
            self.process.kill()

    def _read(self) -> None:
        with self.log.open("ab", buffering=0) as file, contextlib.suppress(OSError):  # when nobody has it any more
            while part := os.read(self._own, 65536):
                file.write(part)
        os.close(self._own)


class Screen:
    """What the few control codes of a progress bar make of a terminal with `columns` and no end of rows.

    lines: what stands there in the end. redrawn: lines that were there before they were erased. wrapped: lines that
    went on below, because the terminal is not wide enough, while the cursor was hidden: so long something is redrawn.
    unknown: control codes that a bar has no use for.
    """

    def __init__(self, columns: int, sent: str) -> None:
        self.lines, self.redrawn, self.wrapped, self.unknown = [""], list[str](), list[str](), list[str]()
        self.cursor_hidden = False
        self._columns, self._row, self._column = columns, 0, 0
        for part in PART.finditer(sent):
            if part[2]:
                self._control(part[1] + part[2], part[0])
            elif part[0].isprintable():
                self._write(part[0])
            else:
                self._move(part[0])

    def _control(self, code: str, sent: str) -> None:
        if code in ("?25l", "?25h"):
            self.cursor_hidden = code == "?25l"
        elif code == "2K":
            self.redrawn += [self.lines[self._row]] if self.lines[self._row] else []
            self.lines[self._row] = ""
        elif code.endswith("A"):
            self._row -= int(code[:-1] or 1)
            assert self._row >= 0, "above the first row"
        elif not code.endswith("m"):
            self.unknown.append(sent)

    def _move(self, sent: str) -> None:
        if sent == "\r":
            self._column = 0
        elif sent == "\n":
            self._row += 1
            self.lines += [""] * (self._row == len(self.lines))
        else:
            self.unknown.append(sent)

    def _write(self, text: str) -> None:
        while text:
            if self._column == self._columns:
                self.wrapped += [self.lines[self._row] + text] if self.cursor_hidden else []
                self._move("\r")
                self._move("\n")
            fits, text = text[: self._columns - self._column], text[self._columns - self._column :]
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + fits + line[self._column + len(fits) :]
            self._column += len(fits)
