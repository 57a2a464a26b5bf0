"""TensorBoard event files under `{run_dir}/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from verl.tracking.backend import Run


class TensorboardBackend:
    """One scalar per metric name; flushed after every step so that a viewer follows the run."""

    def __init__(self, run: Run) -> None:
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()
