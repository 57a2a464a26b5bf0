"""The interface of every tracking back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Run:
    """What a back end knows of the run. `config` has its secrets masked. `total_steps`: None if not known."""

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

    def finish(self, failed: bool = False) -> None:
        """Flush and close. `failed`: the run was ended by an error."""
        ...


@runtime_checkable
class PhaseBackend(Protocol):
    """A back end that shows what the run is doing."""

    def now_in(self, phase: str) -> None:
        """The innermost phase that has begun, by the name that it has in `timing_s/`; "" between them."""
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
