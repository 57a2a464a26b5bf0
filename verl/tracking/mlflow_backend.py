"""MLflow: one run of the experiment that is named after the project."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which it reads when it is imported

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from verl.errors import ConfigError
from verl.process.secrets import MASK, URL_CREDENTIALS
from verl.tracking.backend import RunInfo
from verl.tracking.changed_settings import flattened

log = logging.getLogger(__name__)

MAX_METRICS = 1000  # of a call, by MLflow's REST API
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000
REFUSED = re.compile(r"[^\w/.\- :]")  # by MLflow, in the name of a metric or parameter
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""The loop waits for the server: MLflow's own defaults are minutes."""


class MlflowBackend:
    """Logs to `MLFLOW_TRACKING_URI`; without it to the folder `{run_dir}/mlruns`, which `mlflow ui` shows.

    Metrics keep their names, except that characters which MLflow refuses become `_`, and a metric `a` becomes `a/all`
    if there is also an `a/b`: MLflow's folders cannot have both. The settings of the run become its parameters. If a
    server does not accept a step, a warning is logged and the run continues: `metrics.jsonl` has the step.

    Raises ConfigError when the run cannot be created.
    """

    def __init__(self, run: RunInfo) -> None:
        for name, value in IMPATIENT.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.run_dir.absolute() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs no database
        self._folders: set[str] = set()
        try:
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(run.project)
            identity = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
            self._run_id: str = self._client.create_run(identity, run_name=run.experiment).info.run_id
            params = [Param(_allowed(name), str(value)[:MAX_PARAM_LENGTH]) for name, value in flattened(run.config)]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        except Exception as error:  # its file store raises all kinds
            raise ConfigError(f"trainer.logger: mlflow: {_without_credentials(error)}") from None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        names = {name: _allowed(name) for name in metrics}
        for name in names.values():
            self._folders |= {name[:place] for place, letter in enumerate(name) if letter == "/"}
        rows = [
            Metric(f"{name}/all" if name in self._folders else name, metrics[given], now, step)
            for given, name in names.items()
        ]
        for start in range(0, len(rows), MAX_METRICS):
            part = rows[start : start + MAX_METRICS]
            self._try(partial(self._client.log_batch, self._run_id, metrics=part), f"step {step}")

    def finish(self, failed: bool = False) -> None:
        status = "FAILED" if failed else "FINISHED"
        self._try(partial(self._client.set_terminated, self._run_id, status=status), "the end of the run")

    def _try(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except Exception as error:
            log.warning("MLflow did not take %s: %s", what, _without_credentials(error))


def _allowed(name: str) -> str:
    return REFUSED.sub("_", name)


def _without_credentials(error: Exception) -> str:
    return URL_CREDENTIALS.sub(MASK, str(error))
