"""A training run as a process of its own: watched through its log, and seen to leave no process behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil
from e2e_world import ENV, ROOT
from phases import Phase, has_not_ended, stop_in, title_of
from watched_run import WatchedRun

MARK = "TRAINING_PROCESS"  # in the environment of the run and of all that it starts


class TrainingProcess(WatchedRun):
    """`arguments` of Python; `supervised` starts it through run_with_restart.sh."""

    started: ClassVar[list[TrainingProcess]] = []  # for the end of a test, which may fail before the run's

    def __init__(self, arguments: Sequence[str], log: Path, supervised: bool = False) -> None:
        super().__init__(log)
        self.mark = uuid.uuid4().hex
        self._ours: dict[psutil.Process, bool] = {}
        supervisor = ("bash", "scripts/run_with_restart.sh", "--backoff_s", "1", "--") if supervised else ()
        with log.open("ab") as output:
            # a group of its own, as in a terminal: a Ctrl-C there goes to all processes of the group
            self.process = subprocess.Popen(
                (*supervisor, sys.executable, *arguments),
                **{"cwd": ROOT, "env": ENV | {MARK: self.mark}, "stdout": output, "stderr": output},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
            )
        self.started.append(self)
        self._started_at = psutil.Process(self.process.pid).create_time()

    def end(self, timeout_s: float = 600, others_s: float = 60) -> int:
        """The exit status, when it has ended, and at most `others_s` later all that it started."""
        try:
            status = self.process.wait(timeout_s)
            gone_by = time.monotonic() + others_s
            while left := self.processes():
                assert time.monotonic() < gone_by, f"left behind: {[process.cmdline() for process in left]}"
                time.sleep(0.1)
            return status
        finally:
            self.kill()

    def processes(self, part: str = "") -> list[psutil.Process]:
        """Those alive of the run itself and of all that it started, with `part` in their command line."""
        found = [process for process in psutil.process_iter() if self._is_ours(process)]
        return [process for process in found if part in title_of(process) and has_not_ended(process)]

    def stop_in(self, phase: Phase, number: int = 1) -> list[psutil.Process]:
        """Wait until so many workers are in the phase at once, or more; those, stopped there."""
        return stop_in(phase, self, lambda: self.processes("ray::"), number)

    def kill(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        """Remembered, since to read every environment again and again would take a core that the run needs."""
        with contextlib.suppress(psutil.Error):
            if process not in self._ours:
                ours = process.environ().get(MARK) == self.mark
                if not ours and process.create_time() > self._started_at:
                    return False  # it may be about to become ours
                self._ours[process] = ours
            return self._ours[process]
        return False


def the_error(said: str) -> str:
    """The only line that starts with "error: "; there is no traceback beside it."""
    assert "Traceback" not in said, said[-6000:]
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line
