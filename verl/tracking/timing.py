"""Wall-clock time by named phase of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl.tracking.spans import Span, now


class Timer:
    """Adds up the wall-clock seconds of named phases; a phase entered twice is summed.

    Nested phases each count their own whole duration, so an outer `step` covers the phases inside it.
    An exception still counts the time until it was raised.

        timer = Timer()
        with timer("step"):
            with timer("gen"):
                ...
        timer.seconds  # {"gen": 1.9, "step": 2.0}
        timer.spans    # [Span("gen", ...), Span("step", ...)], in the order of their ends
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.spans.append(Span(phase, start, now()))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.spans[-1].seconds

    def metrics(self) -> dict[str, float]:
        """`timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
