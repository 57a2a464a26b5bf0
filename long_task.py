"""How far a long task is: a bar on a terminal, and lines that can be grepped where the output is a file.

    with Progress("encode", len(corpus), unit="passages") as progress:
        for block in blocks:
            encode(block)
            progress.update(len(block))

On a terminal that is a bar with counts, a rate and the time left. In a file it is a line at each tenth, and after 30
seconds without one, and nothing at all for a task that is over within two seconds:

    [ 64 s] encode: 2100 of 21000 passages, 33.1 a second, 9 min 31 s left

Everything goes to standard error. This module imports nothing of the project, so that every room may use it, and rich
only where there is a terminal.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

T = TypeVar("T")

BYTES = "bytes"
"""The unit of which counts are shown in kB, MB, GB."""
SHORT_S = 2.0
"""In a file a task that is over by then is not worth a line, and no line comes sooner after another."""
QUIET_S = 30.0
"""The longest silence in a file."""
SLOW = 0.1
"""Items a second: of fewer the seconds that each takes are told."""
WIDE = 100
"""Columns of a terminal: on a narrower one the bar is short, so that counts, time left and note have room."""
NAME_SHARE = 4
"""A name takes at most this part of a terminal's columns (a quarter), and is cut."""
_READ_BYTES = 1 << 20


class Progress:
    """`total` None: how much there is to do is not known. `done`: so much was there before, and is not in the rate.

    `shown` False: neither a bar nor lines, for all but one of the processes that share a task. `lines` False: a bar
    alone, for a task that writes lines of its own, with `pace` in them. `console`: where the bar is drawn, instead of
    standard error. `quiet_s`: the longest silence in a file, instead of `QUIET_S`.

    Several at once, also of several threads, stand below each other.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        done: int = 0,
        unit: str = "",
        *,
        shown: bool = True,
        lines: bool = True,
        console: Console | None = None,
        quiet_s: float | None = None,
    ) -> None:
        self._quiet_s = QUIET_S if quiet_s is None else quiet_s
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self.note = ""
        self._before, self._started = done, time.monotonic()
        self._told_at = self._reached_at = self._started
        self._times_reached = 0
        self._over = threading.Event()
        self._changes = threading.Lock()
        self._display = _display(console) if shown else None
        self._beats: threading.Thread | None = None
        if self._display is not None:
            self._display.add(self)
        elif shown and lines:
            self._beats = threading.Thread(target=self._beat, daemon=True)
            self._beats.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def has_bar(self) -> bool:
        """Whether there is a terminal that shows it."""
        return self._display is not None

    def update(self, count: int = 1, note: str | None = None) -> None:
        """So many more are done. `note` is shown behind the counts until there is another."""
        self.reach(self.done + count, note)

    def reach(self, done: int, note: str | None = None) -> None:
        """So many are done in all."""
        with self._changes:
            if done != self.done:
                self._reached_at = time.monotonic()
                self._times_reached += 1
            before, self.done = self.done, done
            self.note = self.note if note is None else note
            if self._display is not None:
                self._display.refresh(self)
            elif self._beats is not None and self._passed_a_tenth(before):
                self._tell()

    def begin(self, done: int, seconds: float = 0.0) -> None:
        """The rate and the time left are those since `done` were done, `seconds` ago: before was something else."""
        self._before, self._started = done, time.monotonic() - seconds
        self._times_reached = 0

    def close(self) -> None:
        """The last bar stays on the screen; in a file nothing more is told."""
        self._over.set()
        if self._beats is not None:
            self._beats.join()
        if self._display is not None:
            self._display.remove(self)
            self._display = None

    def rate(self) -> float:
        """A second, of this run; 0 while nothing is done."""
        seconds = time.monotonic() - self._started - self._waited()
        return max(0.0, self.done - self._before) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """At this rate; None if it is not known."""
        rate = self.rate()
        return None if self.total is None or not rate else max(0.0, (self.total - self.done) / rate - self._waited())

    def _waited(self) -> float:
        """Seconds since anything was done, which are a part of the next item; 0 where they are more than that.

        So the time left of a task with few long items counts down, and grows only when an item takes too long.
        """
        now = time.monotonic()
        waited = now - self._reached_at
        usual = (self._reached_at - self._started) / self._times_reached if self._times_reached else 0.0
        return waited if waited <= 2 * usual else 0.0

    def counts(self) -> str:
        """`2100 of 21000 passages`, `1.2 GB of 14.3 GB`."""
        if self.unit == BYTES:
            return size(self.done) + ("" if self.total is None else f" of {size(self.total)}")
        counts = f"{self.done}" + ("" if self.total is None else f" of {self.total}")
        return f"{counts} {self.unit}".rstrip()

    def pace(self) -> str:
        """`33.1 a second, 9 min 31 s left`; how long it has been going on while nothing is done."""
        return ", ".join(filter(None, [self._speed(), self._left()]))

    def told(self, columns: int | None = None) -> str:
        """Counts, pace and note; without the rate, which the time left implies, where there is no room for all."""
        told = [self.counts(), self._speed(), self._left(), self.note]
        text = ", ".join(filter(None, told))
        if columns is None or len(text) <= columns or not self._left():
            return text
        return ", ".join(filter(None, [told[0], *told[2:]]))

    def _speed(self) -> str:
        rate = self.rate()
        if not rate:
            return f"nothing yet after {duration(time.monotonic() - self._started)}"
        if self.unit == BYTES:
            return f"{size(rate)} a second"
        return f"{1 / rate:.3g} s each" if rate < SLOW else f"{rate:{'.0f' if rate > 100 else '.3g'}} a second"

    def _left(self) -> str:
        """Empty where that is not known, and at the end."""
        left = self.seconds_left()
        return "" if left is None or self._is_done() else f"{duration(left)} left"

    def _is_done(self) -> bool:
        return self.total is not None and self.done >= self.total

    def _passed_a_tenth(self, before: int) -> bool:
        if not self.total or 10 * self.done // self.total <= 10 * before // self.total:
            return False
        return time.monotonic() - self._told_at >= SHORT_S or (self._is_done() and self._told_at > self._started)

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        seconds = time.time() - psutil.Process().create_time()
        print(f"[{seconds:3.0f} s] {self.what}: {self.told()}", file=sys.stderr, flush=True)

    def _beat(self) -> None:
        while not self._over.wait(max(0.01, self._told_at + self._quiet_s - time.monotonic())):
            with self._changes:
                if time.monotonic() - self._told_at >= self._quiet_s:
                    self._tell()


def track(items: Iterable[T], what: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """The `items`, each counted when the next one is asked for."""
    with Progress(what, total, unit=unit) as progress:
        for item in items:
            yield item
            progress.update()


@contextmanager
def reading(path: Path, what: str | None = None) -> Iterator[io.BufferedReader]:
    """`path`, open for reading from its beginning to its end: how far that is in its bytes, packed as they may be."""
    with (
        path.open("rb", buffering=0) as file,
        Progress(what or f"read {path.name}", _size(file), unit=BYTES) as progress,
    ):
        yield io.BufferedReader(_Watched(file, progress), _READ_BYTES)


def size(num_bytes: float) -> str:
    """`1.2 GB`: of 1000 MB each, as disks and networks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """`41 s`, `9 min 31 s`, `2 h 30 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _size(file: io.FileIO) -> int:
    return os.fstat(file.fileno()).st_size


class _Watched(io.RawIOBase):
    """Bytes of a file, counted as they are read."""

    def __init__(self, file: io.FileIO, progress: Progress) -> None:
        self._file, self._progress = file, progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._progress.update(count)
        return count


class _Display:
    """The bars of a terminal, drawn while there is at least one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._tasks: dict[Progress, int] = {}
        self._changes = threading.RLock()

    def add(self, progress: Progress) -> None:
        with self._changes:
            if self._bars is None:
                self._bars = _bars(self._console)
                self._bars.start()
            self._tasks[progress] = self._bars.add_task(progress.what, progress=progress)
            self.refresh(progress)

    def refresh(self, progress: Progress) -> None:
        with self._changes:
            if self._bars is not None and progress in self._tasks:
                self._bars.update(self._tasks[progress], completed=progress.done, total=progress.total)  # type: ignore[arg-type]

    def remove(self, progress: Progress) -> None:
        """The last one stays on the screen as it is."""
        with self._changes:
            task = self._tasks.pop(progress, None)
            if self._bars is None or task is None:
                return
            if self._tasks:
                self._bars.remove_task(task)  # type: ignore[arg-type]
            else:
                self._bars.stop()
                self._bars = None


def _bars(console: Console) -> Bars:
    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.constrain import Constrain
    from rich.measure import Measurement
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column
    from rich.text import Text

    class InItsColumns:
        """What is told of a task in as many columns as are left."""

        def __init__(self, progress: Progress) -> None:
            self._progress = progress

        def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
            return Measurement(1, len(self._progress.told()))

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Text(self._progress.told(options.max_width), overflow="ellipsis", no_wrap=True)

    class Told(ProgressColumn):
        def render(self, task: Task) -> Any:
            return InItsColumns(task.fields["progress"])

    class RoomForCtrlC(Bars):
        """Bars that leave room for what a terminal writes behind them when that is pressed: else it would be below, and
        the bars be drawn again on another line.
        """

        def get_renderable(self) -> RenderableType:
            return Constrain(super().get_renderable(), console.width - len("^C"))

    cut = Column(no_wrap=True, overflow="ellipsis", max_width=console.width // NAME_SHARE)
    name = TextColumn("{task.description}", markup=False, table_column=cut)
    # What is printed meanwhile goes above the bars; standard output only where it is a terminal too, and not a file.
    columns = (name, BarColumn(bar_width=20 if console.width >= WIDE else 6), Told())
    return RoomForCtrlC(*columns, console=console, refresh_per_second=4, redirect_stdout=sys.stdout.isatty())


_STDERR: list[_Display] = []  # one for all, made when there is a bar to draw
_MAKING = threading.Lock()


def _display(console: Console | None) -> _Display | None:
    """That of `console`, or of standard error; None where that is no terminal that can move its cursor."""
    if console is not None:
        return _Display(console) if console.is_terminal else None
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    with _MAKING:
        if not _STDERR:
            from rich.console import Console

            _STDERR.append(_Display(Console(stderr=True)))
        return _STDERR[0]
