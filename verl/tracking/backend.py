"""What every place that metrics go to has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """What a back end is told about the run. `config` has its secrets masked. `total_steps`: None if not known."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    total_steps: int | None = None


class Backend(Protocol):
    """One place that metrics go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step; several calls for one step add up."""
        ...

    def finish(self) -> None:
        """Flush and close."""
        ...
