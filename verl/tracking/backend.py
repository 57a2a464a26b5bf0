"""The interface of every tracking back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that a back end gets. Secrets in `config` are masked. `total_steps` is None if unknown."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    total_steps: int | None = None


class Backend(Protocol):
    """A destination for metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step; several calls for one step are merged."""
        ...

    def finish(self, failed: bool = False) -> None:
        """Flush and close. `failed`: the run ended with an error."""
        ...


@runtime_checkable
class PhaseBackend(Protocol):
    """A back end that shows what the run is doing."""

    def now_in(self, phase: str) -> None:
        """Receive the innermost phase that is running, by its name in `timing_s/`; "" between phases."""
        ...


@dataclass(frozen=True)
class Sample:
    """A trajectory as a tracker shows it. `reward` is None for a failed one; `gold` is the reward's ground truth."""

    data_source: str
    question: str
    gold: str
    response: str
    status: str
    searches: int
    reward: float | None
    components: Mapping[str, float]


@runtime_checkable
class SampleBackend(Protocol):
    """A back end that shows trajectories beside the metrics."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show `samples` of a step; called before the `log` of the step."""
        ...
