"""Sends a run's metrics, and the trajectories of a step that they show, to the back ends that the settings name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl.errors import ConfigError
from verl.process.secrets import mask_secrets
from verl.process.storage import whole_file
from verl.protocol import Source, Trajectory
from verl.tracking.backend import Backend, PhaseBackend, RunInfo, Sample, SampleBackend, forget_tracker_runs
from verl.tracking.jsonl_backend import JsonlBackend

if TYPE_CHECKING:
    from verl.config.sections.trainer import TrainerConfig

BACKENDS = {
    "console": "verl.tracking.console_backend.ConsoleBackend",
    "mlflow": "verl.tracking.mlflow_backend.MlflowBackend",
    "tensorboard": "verl.tracking.tensorboard_backend.TensorboardBackend",
    "wandb": "verl.tracking.wandb_backend.WandbBackend",
}
"""Back ends by the name used in `trainer.logger`; imported only when named. `jsonl` is always on."""
CONFIG_FILE = "config.yaml"


class Tracker:
    """Writes `config.yaml` (secrets masked) into `run_dir` and logs to metrics.jsonl plus the named back ends.

    `loggers`: any of console, mlflow, tensorboard, wandb, jsonl. With `trainer.metrics_port` in `config`, Prometheus
    can scrape the metrics, too. `total_steps` is for the progress bar. With `resumed`, the runs that W&B and MLflow
    have of the folder are continued. Usable in a `with` statement.

    Raises ConfigError for a name that is not available, and StorageError, as `log` does, for a file that cannot be
    written.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        project: str,
        experiment: str,
        run_dir: Path | str,
        config: Mapping[str, Any],
        total_steps: int | None = None,
        resumed: bool = False,
    ) -> None:
        check_loggers(loggers)
        run = RunInfo(project, experiment, Path(run_dir), mask_secrets(config), total_steps)
        with whole_file(run.run_dir / CONFIG_FILE) as temporary:
            temporary.write_text(settings_text(config), encoding="utf-8")
        # Before the back ends are made: they continue the runs that they find noted in the folder.
        if not resumed:
            forget_tracker_runs(run.run_dir)
        self._backends: list[Backend] = [JsonlBackend(run)]
        try:
            for name in dict.fromkeys(loggers):
                if name != "jsonl":
                    self._backends.append(_load(name)(run))
            self._backends += _prometheus(run)
        except BaseException:
            self.finish(failed=True)
            raise

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers (Python, numpy or one-element tensors) of a step; may be called several times for one step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        for backend in self._backends:
            backend.log(numbers, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show trajectories of a step in the back ends that support it; call it before the `log` of that step."""
        for backend in self._backends:
            if samples and isinstance(backend, SampleBackend):
                backend.log_samples(samples, step)

    def now_in(self, phase: str) -> None:
        """Show the current phase in the back ends that support it."""
        for backend in self._backends:
            if isinstance(backend, PhaseBackend):
                backend.now_in(phase)

    def finish(self, failed: bool = False) -> None:
        """Close every back end, the last one first, also when one raises; safe to call twice. `failed`: the run ended
        with an error.
        """
        with ExitStack() as closing:
            for backend in self._backends:
                closing.callback(backend.finish, failed)
            self._backends = []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(failed=kind is not None)


def settings_text(config: Mapping[str, Any]) -> str:
    """The contents of a run's `config.yaml`: YAML, secrets masked."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(mask_secrets(config))))


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise ConfigError unless every name is a back end that is available here."""
    for name in loggers:
        if name in BACKENDS or name == "jsonl":
            continue
        raise ConfigError(f"trainer.logger: '{name}' is unknown; choose from {', '.join(['jsonl', *BACKENDS])}")


def _load(name: str) -> Any:
    module, _, attribute = BACKENDS[name].rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"trainer.logger: '{name}' is not installed: .venv/bin/pip install -e '.[{name}]'") from error


def _prometheus(run: RunInfo) -> list[Backend]:
    """The back end for Prometheus in a list, which is empty if none is wanted; only then its library is imported."""
    trainer = run.config.get("trainer") or {}
    port = trainer.get("metrics_port")
    if port is None:
        return []
    from verl.tracking.prometheus_backend import PrometheusBackend

    return [PrometheusBackend(run, trainer["metrics_host"], port)]


def samples_to_show(
    trainer: TrainerConfig, trajectories: Sequence[Trajectory], step: int, decode: Callable[[Sequence[int]], str]
) -> list[Sample]:
    """At most `log_trajectories` trajectories of step 1 and of every `log_trajectories_freq`-th step, else none.

    The first of each group, in the order they were sampled, then the second of each, and so on.
    """
    if step != 1 and step % trainer.log_trajectories_freq:
        return []
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    in_turn = (one for round_ in zip_longest(*groups.values()) for one in round_ if one is not None)
    return [_sample(one, decode) for one, _ in zip(in_turn, range(trainer.log_trajectories), strict=False)]


def _sample(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> Sample:
    row = trajectory.prompt.row
    written = [one for one in trajectory.segments if one.source in (Source.POLICY, Source.ENVIRONMENT)]
    # Where the question is depends on the data set; without one, the prompt stands for it.
    question = row.get("question") or (row.get("extra_info") or {}).get("question") or decode(trajectory.prompt.ids)
    gold = (row.get("reward_model") or {}).get("ground_truth")
    return Sample(
        data_source=trajectory.prompt.data_source,
        question=str(question),
        gold=json.dumps(gold, ensure_ascii=False, default=str),
        response="".join(decode(segment.ids) for segment in written),
        status=str(trajectory.status),
        searches=trajectory.num_searches,
        reward=trajectory.reward,
        components=dict(trajectory.reward_components),
    )
