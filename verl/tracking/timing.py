"""Wall-clock time by named phase of a training step."""

from __future__ import annotations

from verl.tracking.spans import SpanRecorder


class Timer(SpanRecorder):
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

    @property
    def seconds(self) -> dict[str, float]:
        """Of the phases that have ended."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """`timing_s/{phase}` in seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
