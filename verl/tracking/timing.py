"""Wall-clock time by named phase of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the wall-clock seconds of named phases; a phase entered twice is summed.

    Nested phases each count their own whole duration, so an outer `step` covers the phases inside it.
    An exception still counts the time until it was raised.

        timer = Timer()
        with timer("step"):
            with timer("gen"):
                ...
        timer.seconds  # {"gen": 1.9, "step": 2.0}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
