"""Named spans of wall-clock time, from which the timeline of a step is made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_EPOCH_S = time.time() - time.perf_counter()  # one clock that never jumps, and that the processes of a host share


def now() -> float:
    """Seconds since the epoch."""
    return _EPOCH_S + time.perf_counter()


@dataclass(frozen=True)
class Span:
    """`start` and `end` in seconds since the epoch."""

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
