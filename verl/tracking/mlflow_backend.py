"""MLflow: one run of the experiment that is named after the project."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from verl.tracking.backend import Run

MAX_METRICS = 1000  # of a call, by MLflow's REST API
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000


class MlflowBackend:
    """Logs to `MLFLOW_TRACKING_URI`; without it to the folder `{run_dir}/mlruns`, which `mlflow ui` shows.

    Metrics keep their names. The settings of the run are its parameters.
    """

    def __init__(self, run: Run) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.run_dir.absolute() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no database
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        identity = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        self._run_id: str = self._client.create_run(identity, run_name=run.experiment).info.run_id
        params = [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in _leaves(run.config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(rows), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[start : start + MAX_METRICS])

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
