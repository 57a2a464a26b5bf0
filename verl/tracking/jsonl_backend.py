"""metrics.jsonl: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.tracking.backend import Run

FILE_NAME = "metrics.jsonl"


class JsonlBackend:
    """Appends `{"step": int, "time": unix seconds, name: number, ...}` and flushes after every line.

    NaN and infinities become null, so that every line is valid JSON. A resumed run goes on in the same file.
    """

    def __init__(self, run: Run) -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run.run_dir / FILE_NAME).open("a", encoding="ascii")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        record: dict[str, Any] = {"step": step, "time": time.time()}
        record |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def set_aside(run_dir: Path) -> None:
    """Keep the metrics of an earlier run in this folder, as `metrics.1.jsonl`, `metrics.2.jsonl` and so on."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
