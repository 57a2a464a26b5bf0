"""metrics.jsonl: one JSON object per line, readable while the run is going."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from verl.process.storage import append, cut_unfinished_line
from verl.tracking.backend import RunInfo

FILE_NAME = "metrics.jsonl"


class JsonlBackend:
    """Appends `{"step": int, "time": unix seconds, name: number, ...}`, complete lines only.

    NaN and infinities become null, so that every line is valid JSON. A resumed run appends to the same file, after the
    last complete line.
    """

    def __init__(self, run: RunInfo) -> None:
        self._path = run.run_dir / FILE_NAME
        cut_unfinished_line(self._path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        record: dict[str, Any] = {"step": step, "time": time.time()}
        record |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        append(self._path, json.dumps(record).encode("ascii") + b"\n")

    def finish(self, failed: bool = False) -> None:
        """Does nothing: every line is already written."""
