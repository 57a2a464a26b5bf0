"""Wall-clock time by named phase of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    def __init__(self, entered: Callable[[str], None] = lambda phase: None) -> None:
        """`entered` is told the innermost phase whenever that changes; "" outside of all."""
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._entered = entered
        self._inside: list[str] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = now()
        self._inside.append(phase)
        self._entered(phase)
        try:
            yield
        finally:
            self._inside.remove(phase)
            self._entered(self._inside[-1] if self._inside else "")
            self.spans.append(Span(phase, start, now()))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.spans[-1].seconds

    def metrics(self) -> dict[str, float]:
        """`timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
