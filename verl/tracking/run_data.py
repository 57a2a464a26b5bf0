"""What a run left on disk, finished or not, loaded for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from text_file import read_text
from verl.errors import DataError
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.tracker import CONFIG_FILE

Curve = dict[int, float]  # value by step, in order of step


@dataclass(frozen=True)
class RunData:
    """`metrics[step][name]`, steps in order; a null in the file (NaN or infinity) is NaN here."""

    run_dir: Path
    metrics: dict[int, dict[str, float]]
    config: dict[str, Any]

    def curve(self, name: str) -> Curve:
        """The finite values of one metric by step."""
        return {step: row[name] for step, row in self.metrics.items() if name in row and math.isfinite(row[name])}

    def names(self, prefix: str) -> list[str]:
        """The rest of each metric name that starts with `prefix`, in order of first use."""
        found = (name for row in self.metrics.values() for name in row if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in dict.fromkeys(found)]

    def setting(self, dotted: str) -> Any:
        """The configuration value at `a.b.c`, or None."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def load_run(run_dir: Path | str, may_be_empty: bool = False) -> RunData:
    """Read metrics.jsonl and config.yaml (which may be absent).

    Lines of one step are merged and a later line wins, so a step repeated after a resume counts once. A last line cut
    short by a crash is ignored. Raises DataError for any other line that is not the metrics of a step, for a
    config.yaml that is not YAML, if metrics.jsonl is missing, and if it has no steps (unless `may_be_empty`).
    """
    run_dir = Path(run_dir)
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise DataError(f"{path} is missing: give the folder of a run (trainer.default_local_dir)")
    metrics: dict[int, dict[str, float]] = {}
    for step, row in _steps(path):
        metrics.setdefault(step, {}).update(row)
    if not metrics and not may_be_empty:
        raise DataError(f"{path} has no step yet")
    return RunData(run_dir, dict(sorted(metrics.items())), _config(run_dir / CONFIG_FILE))


def _steps(path: Path) -> Iterable[tuple[int, dict[str, float]]]:
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            # Only the last line can be cut short by a crash.
            if number == len(lines):
                return
            raise DataError(f"{path}, line {number}: not JSON ({error}); remove the line") from error
        try:
            step = int(record["step"])
            values = {name: record[name] for name in record if name not in ("step", "time")}
            # JSON lacks NaN and infinity, for which the file has null.
            row = {name: math.nan if value is None else float(value) for name, value in values.items()}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path}, line {number}: not the metrics of a step ({error!r}); remove the line") from error
        yield step, row


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = yaml.safe_load(read_text(path, DataError))
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not YAML: {error}; correct it, or remove it") from error
    return loaded if isinstance(loaded, dict) else {}
