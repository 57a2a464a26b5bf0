"""The timeline of a step: `timeline/step_N.json` in the run folder, for chrome://tracing or ui.perfetto.dev.

The driver, each engine, and each rank of a trained role have a row. Times count from the first span. The clocks of
different nodes may be slightly out of sync; durations do not depend on that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.process.storage import whole_file
from verl.tracking.spans import Span

FOLDER = "timeline"
MICROSECONDS = 1e6


def write_timeline(run_dir: Path, step: int, spans: Mapping[str, Sequence[Span]]) -> Path:
    """Write the spans, given by row name, and return the path. Raises StorageError."""
    path = run_dir / FOLDER / f"step_{step}.json"
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    return path


def chrome_trace(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Trace Event Format, "JSON Object Format": complete events ("X") with times in microseconds."""
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
