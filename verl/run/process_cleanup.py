"""Ends the processes that a killed driver leaves behind, and logs how to resume.

Ray's own helpers notice only after a minute that their driver is gone. The cleanup is a separate process, which
outlives the driver: it notices the driver's end by the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from verl.process.startup import log_to_stderr
from verl.run.saved_state import how_to_resume

GRACE_S = 5.0  # most end by themselves

log = logging.getLogger("verl.run.process_cleanup")  # run as a program its __name__ is another


class ProcessCleanup:
    """The driver's side of the cleanup. `stop` is for a driver that has ended its processes itself."""

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", "verl.run.process_cleanup", str(run_dir)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self) -> None:
        """Have this process's current descendants ended, and the newest state named, if it ends without `stop`."""
        processes = psutil.Process().children(recursive=True)
        self._send([(process.pid, process.create_time()) for process in processes])

    def stop(self) -> None:
        self._send([])
        self._process.communicate()

    def _send(self, processes: list[tuple[int, float]]) -> None:
        with contextlib.suppress(OSError):  # the cleanup's process was killed itself
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(processes) + "\n")
            self._process.stdin.flush()


def main() -> None:
    log_to_stderr()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to all processes of a run does not end its cleanup
    watched: list[tuple[int, float]] = []
    for line in sys.stdin:
        watched = json.loads(line)
    if watched:
        time.sleep(GRACE_S)
        _end(watched)
        log.error("the driver ended without a message: it was killed, or Ray's library ended it")
        log.warning(how_to_resume(Path(sys.argv[1])))


def _end(processes: list[tuple[int, float]]) -> None:
    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created and process != psutil.Process():
                process.kill()


if __name__ == "__main__":
    main()
