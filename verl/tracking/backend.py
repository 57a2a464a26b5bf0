"""The interface of every tracking back end, and which runs of W&B and MLflow belong to a run folder: a run that is
resumed there continues them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from url_text import without_credentials
from verl.process.storage import whole_file

log = logging.getLogger(__name__)


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


FILE_NAME = "trackers.json"


def give(name: str, call: Callable[[], object], what: str) -> None:
    """Give `what` to the tracker `name` by `call`. An error of its server, process or disk is a warning: the run
    continues, and `metrics.jsonl` has the step.
    """
    try:
        call()
    except Exception as error:
        log.warning("%s did not take %s: %s", name, what, without_credentials(str(error)))


def tracker_run(run_dir: Path, tracker: str) -> str | None:
    """The identifier that `keep_tracker_run` has kept; None without one."""
    return _kept(run_dir).get(tracker)


def keep_tracker_run(run_dir: Path, tracker: str, identifier: str) -> None:
    """Keep the identifier of the run at `tracker`. Raises StorageError."""
    kept = _kept(run_dir) | {tracker: identifier}
    with whole_file(run_dir / FILE_NAME) as temporary:
        temporary.write_text(json.dumps(kept) + "\n", encoding="utf-8")


def forget_tracker_runs(run_dir: Path) -> None:
    """Let the next runs at the trackers be new ones."""
    (run_dir / FILE_NAME).unlink(missing_ok=True)


def _kept(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
