"""Weights & Biases. Without an account it writes an offline run that `wandb sync` can send later."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal
from urllib.parse import urlparse

import wandb

from url_text import without_credentials
from verl.errors import ConfigError
from verl.tracking.backend import RunInfo, Sample, give, keep_tracker_run, tracker_run

TRACKER = "wandb"
COLUMNS = ("step", "data_source", "question", "gold", "response", "status", "searches", "reward")

logger = logging.getLogger(__name__)


class WandbBackend:
    """Writes a W&B run under `{run_dir}/wandb`, in the mode of `WANDB_MODE`; without that and an API key, offline.

    A resumed run continues its run at W&B, if that was not deleted. Of steps that are run again W&B keeps the first
    values. Offline, each start writes a folder of its own with the same run's name, and `wandb sync` joins them. If W&B
    does not take a step, since its process has ended, say, a warning is logged and the run continues: `metrics.jsonl`
    has the step.

    Raises ConfigError when the run cannot be started.
    """

    def __init__(self, run: RunInfo) -> None:
        # Without a key nothing can be sent: an offline run keeps it for `wandb sync`.
        mode: Literal["offline"] | None = None
        if "WANDB_MODE" not in os.environ and not _has_api_key():
            mode = "offline"
            logger.warning("W&B: no API key and WANDB_MODE unset: offline run in %s", run.run_dir / "wandb")
        earlier = tracker_run(run.run_dir, TRACKER)
        try:
            self._run = _start(run, mode, None) if earlier is None else _continued(run, mode, earlier)
        except wandb.Error as error:
            why = without_credentials(str(error))
            todo = "correct that, set WANDB_MODE=offline, or leave wandb out"
            raise ConfigError(f"trainer.logger: wandb: {why}; {todo}") from None
        keep_tracker_run(run.run_dir, TRACKER, self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        give("W&B", partial(self._run.log, dict(metrics), step=step), f"step {step}")

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """The table `trajectories/train`, a new one per step, with a column for each component of the reward."""
        give("W&B", partial(self._log_table, samples, step), f"the trajectories of step {step}")

    def _log_table(self, samples: Sequence[Sample], step: int) -> None:
        components = list(dict.fromkeys(name for sample in samples for name in sample.components))
        table = wandb.Table(columns=[*COLUMNS, *components])
        for sample in samples:
            table.add_data(
                step, *(getattr(sample, name) for name in COLUMNS[1:]), *(sample.components.get(c) for c in components)
            )
        self._run.log({"trajectories/train": table}, step=step)

    def finish(self, failed: bool = False) -> None:
        """Close the run and end W&B's service process: without that, the file may still be written after the return."""
        give("W&B", partial(self._run.finish, exit_code=int(failed)), "the end of the run")
        give("W&B", wandb.teardown, "the end of its process")


def _continued(run: RunInfo, mode: Literal["offline"] | None, earlier: str) -> wandb.Run:
    """The run with the identifier `earlier`, or, with a warning, a new one. Raises wandb.Error."""
    try:
        return _start(run, mode, earlier)
    except wandb.Error as error:
        why = without_credentials(str(error))
        logger.warning("W&B: run %s cannot be continued (%s), so a new one is started", earlier, why)
        return _start(run, mode, None)


def _start(run: RunInfo, mode: Literal["offline"] | None, earlier: str | None) -> wandb.Run:
    """Start a W&B run, or continue the one with the identifier `earlier`. Raises wandb.Error."""
    return wandb.init(
        project=run.project,
        name=run.experiment,
        id=earlier,
        # Offline nothing can be asked, and W&B would warn that it ignores this.
        resume="allow" if earlier and (mode or os.environ.get("WANDB_MODE")) not in ("offline", "dryrun") else None,
        dir=str(run.run_dir),
        config=dict(run.config),
        allow_val_change=True,
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),  # the console back end owns the terminal
    )


def _has_api_key() -> bool:
    """Whether there is a key where W&B itself looks: in the environment, then in the netrc entry of its server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
