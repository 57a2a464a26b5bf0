"""Writes files in the background while the next step runs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from verl.errors import StorageError

SLOW_S = 1.0  # a hand-over that waits longer is logged

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs that each write a file, one at a time, on a separate thread.

    At most `max_jobs` are held, including the running one: what they write stays in memory until they are done. The
    first error of a job is raised once, by the next `hand_over` or `drain`. Later jobs still run.
    """

    def __init__(self, max_jobs: int = 2) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[Callable[[], object]] = deque()  # the first one is running
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="background writer", daemon=True)
        self._thread.start()

    def hand_over(self, job: Callable[[], object]) -> None:
        """Queue a job; if the queue is full, wait for room, and log a long wait.

        Raises what an earlier job raised; this job still runs. Raises ValueError after `close`.
        """
        start = time.perf_counter()
        with self._changed:
            if self._closed:
                raise ValueError("the writer is closed")
            self._changed.wait_for(lambda: len(self._jobs) < self._max_jobs)
            self._jobs.append(job)
            self._changed.notify_all()
        waited_s = time.perf_counter() - start
        if waited_s > SLOW_S:
            log.warning(
                "waited %.1f s for files of earlier steps to be written: the disk is slower than a step", waited_s
            )
        # Last of all: the job is queued, whatever an earlier one raised.
        self._raise_error()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every job is done, for at most `timeout_s` seconds if given.

        Raises what a job raised, and StorageError on a timeout.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._jobs, timeout_s)
        self._raise_error()
        if not done:
            raise StorageError(
                f"{len(self._jobs)} files were not written within {timeout_s:.0f} s; check the disk and start again"
            )

    def close(self) -> None:
        """Accept no more jobs; the thread ends after the last one. Does not wait (`drain` does); safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
            try:
                # A job stays in the queue while it runs: it still takes memory, and `drain` has to wait for it.
                self._jobs[0]()
            except BaseException as error:  # whatever it is, it belongs into the thread that handed the job over
                self._error = self._error or error
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
