"""Wall-clock time by named phase of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.tracking.spans import SpanRecorder


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
        """`timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
