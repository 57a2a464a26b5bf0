"""How far a long run of many small jobs is: a bar on a terminal, now and then a line in a log file."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from tqdm import tqdm

from verl.startup import tell

QUIET_S = 30.0  # the longest silence in a log file


class Progress:
    """`with Progress("questions", 500) as progress: progress.update()`.

    In a log file there is a line at each tenth, and after 30 seconds without one: how many are done, how many a second
    (of this run: `done` at the start are those of an earlier one) and how long the rest will take at this rate.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._before = what, total, done, done
        self._started = time.monotonic()
        self._bar = tqdm(total=total, initial=done, desc=what, unit=" " + what, disable=None)
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Progress:
        if self._bar.disable:
            self._beats.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        self._bar.close()

    def update(self, count: int = 1) -> None:
        tenths = 10 * self._done // self._total
        self._done += count
        self._bar.update(count)
        if self._bar.disable and 10 * self._done // self._total > tenths:
            tell(self._line())

    def _beat(self) -> None:
        while not self._over.wait(QUIET_S):
            tell(self._line())

    def _line(self) -> str:
        seconds = time.monotonic() - self._started
        counts = f"{self._what}: {self._done} of {self._total}"
        rate = (self._done - self._before) / seconds if seconds else 0.0
        if not rate:
            return f"{counts} after {_duration(seconds)}"
        left = f", {_duration((self._total - self._done) / rate)} left" if self._done < self._total else ""
        return f"{counts}, {rate:.3g} a second{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
