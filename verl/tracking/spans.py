"""Named spans of wall-clock time, from which the timeline of a step is made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.process.storage import whole_file

_EPOCH_S = time.time() - time.perf_counter()  # one clock that never jumps, and that the processes of a host share
FOLDER = "timeline"
MICROSECONDS = 1e6


def now() -> float:
    """Seconds since the epoch."""
    return _EPOCH_S + time.perf_counter()


@dataclass(frozen=True)
class Span:
    """A named span of time; `start` and `end` in seconds since the epoch."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SpanRecorder:
    """Records spans that follow each other or are nested. An exception still ends the span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []  # in the order of their ends

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, now()))

    def take(self) -> list[Span]:
        """The spans that have ended since the last call."""
        taken, self.spans = self.spans, []
        return taken


class OverlapRecorder:
    """Records the spans in which at least one of many overlapping tasks runs: from the first start to the last end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inside = 0
        self._start = 0.0
        self._spans: list[Span] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._inside == 0:
            self._start = now()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._spans.append(Span(self.name, self._start, now()))

    def take(self) -> list[Span]:
        """The spans that have ended since the last call, and the part so far of a span that is still open."""
        if self._inside:
            self._spans.append(Span(self.name, self._start, now()))
            self._start = self._spans[-1].end
        taken, self._spans = self._spans, []
        return taken


def covered_s(spans: Iterable[Span], windows: Sequence[Span]) -> float:
    """Seconds of `windows`, which do not overlap each other, covered by at least one of `spans`."""
    total, edges = 0.0, sorted((span.start, span.end) for span in spans)
    for window in windows:
        reached = window.start
        for start, end in edges:
            if end > reached and start < window.end:
                total += min(end, window.end) - max(start, reached)
                reached = min(end, window.end)
    return total


def gaps(spans: Iterable[Span], window: Span, name: str) -> list[Span]:
    """The parts of `window` that none of `spans` covers, as spans called `name`."""
    found, reached = [], window.start
    inside = (span for span in spans if span.start < window.end)
    for span in sorted(inside, key=lambda one: one.start):
        if span.start > reached:
            found.append(Span(name, reached, span.start))
        reached = max(reached, span.end)
    if reached < window.end:
        found.append(Span(name, reached, window.end))
    return found


# Wall-clock time by named phase of a training step.


class Timer(SpanRecorder):
    """Adds up the wall-clock seconds of named phases; a phase entered twice is summed.

    Each nested phase counts its full duration, so an outer `step` covers the phases inside it. If a phase ends with an
    exception, the time until then still counts.

        timer = Timer()
        with timer("step"):
            with timer("gen"):
                ...
        timer.seconds  # {"gen": 1.9, "step": 2.0}
        timer.spans    # [Span("gen", ...), Span("step", ...)], in the order of their ends
    """

    def __init__(self, entered: Callable[[str], None] = lambda phase: None) -> None:
        """`entered` is called with the innermost phase whenever that changes; "" outside all phases."""
        super().__init__()
        self._entered = entered
        self._inside: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._inside.append(name)
        self._entered(name)
        try:
            with super().__call__(name):
                yield
        finally:
            self._inside.remove(name)
            self._entered(self._inside[-1] if self._inside else "")

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, for the phases that have ended."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """The metrics `timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


# The timeline of a step: `timeline/step_N.json` in the run folder, for chrome://tracing or ui.perfetto.dev.


def write_timeline(run_dir: Path, step: int, spans: Mapping[str, Sequence[Span]]) -> Path:
    """Write the spans, given by row name, and return the path. Raises StorageError."""
    path = run_dir / FOLDER / f"step_{step}.json"
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    return path


def chrome_trace(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """The spans in Trace Event Format, "JSON Object Format": complete events ("X") with times in microseconds."""
    begin = min((span.start for row in spans.values() for span in row), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (name, row) in enumerate(spans.items()):
        place = {"pid": 1, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
        for span in sorted(row, key=lambda one: (one.start, -one.end)):
            start, seconds = span.start - begin, span.seconds
            times = {"ts": round(start * MICROSECONDS, 1), "dur": round(seconds * MICROSECONDS, 1)}
            events.append({"ph": "X", "name": span.name, **place, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
