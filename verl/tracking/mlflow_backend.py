"""MLflow: one run of the experiment that is named after the project."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which it reads when it is imported

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag

from url_text import without_credentials
from verl.errors import ConfigError
from verl.tracking.backend import RunInfo, give, keep_tracker_run, tracker_run
from verl.tracking.changed_settings import flattened

log = logging.getLogger(__name__)

TRACKER = "mlflow"
MAX_METRICS = 1000  # of a call, by MLflow's REST API
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000
MAX_NAME_LENGTH = 240  # MLflow takes 250, but `/all` or `resumed.` may be added
REFUSED = re.compile(r"[^\w/.\- :]")  # by MLflow, in the name of a metric or parameter
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""The loop waits for the server: MLflow's own defaults are minutes."""


class MlflowBackend:
    """Logs to `MLFLOW_TRACKING_URI`; without it to the folder `{run_dir}/mlruns`, which `mlflow ui` shows.

    Metrics keep their names, except that what MLflow refuses becomes `_`, a long name ends with a hash in place of its
    rest, and a metric `a` becomes `a/all` if there is also an `a/b`: MLflow's folders cannot have both. The settings of
    the run become its parameters. If a server does not accept a step, a warning is logged and the run continues:
    `metrics.jsonl` has the step. A resumed run continues its run at MLflow, if that is still there.

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
            earlier = self._earlier(tracker_run(run.run_dir, TRACKER))
            self._run_id: str = earlier.info.run_id if earlier else self._new(run)
            self._log_settings(run.config, earlier.data.params if earlier else {})
        except Exception as error:  # its file store raises all kinds
            # Not chained: a traceback could show the credentials in the address.
            raise ConfigError(f"trainer.logger: mlflow: {without_credentials(str(error))}") from None
        keep_tracker_run(run.run_dir, TRACKER, self._run_id)

    def _earlier(self, identifier: str | None) -> Run | None:
        """The run of the folder, which is then running again; None, with a warning, if it is gone."""
        if identifier is None:
            return None
        try:
            earlier = self._client.get_run(identifier)
            if earlier.info.lifecycle_stage != LifecycleStage.ACTIVE:
                raise ConfigError("it was deleted")
            # When its earlier start ended, it was marked as finished or failed.
            self._client.update_run(identifier, status="RUNNING")
        except Exception as error:
            why = without_credentials(str(error))
            log.warning("MLflow: run %s cannot be continued (%s), so a new one is started", identifier, why)
            return None
        return earlier

    def _new(self, run: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        identity = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        return str(self._client.create_run(identity, run_name=run.experiment).info.run_id)

    def _log_settings(self, config: Mapping[str, Any], logged: Mapping[str, str]) -> None:
        """Log the settings as parameters; those that differ from what is `logged`, which cannot be changed, as tags."""
        now = {_allowed(name): str(value)[:MAX_PARAM_LENGTH] for name, value in flattened(config)}
        params = [Param(name, value) for name, value in now.items() if name not in logged]
        tags = [RunTag(f"resumed.{name}", value) for name, value in now.items() if logged.get(name, value) != value]
        for start in range(0, max(len(params), len(tags)), MAX_PARAMS):
            part = slice(start, start + MAX_PARAMS)
            self._client.log_batch(self._run_id, params=params[part], tags=tags[part])

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
            give("MLflow", partial(self._client.log_batch, self._run_id, metrics=part), f"step {step}")

    def finish(self, failed: bool = False) -> None:
        status = "FAILED" if failed else "FINISHED"
        give("MLflow", partial(self._client.set_terminated, self._run_id, status=status), "the end of the run")


def _allowed(name: str) -> str:
    """`name` as MLflow takes it: a path whose parts name something, and not too long; a hash tells cut ones apart."""
    parts = REFUSED.sub("_", name).split("/")
    allowed = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if len(allowed) <= MAX_NAME_LENGTH:
        return allowed
    return allowed[: MAX_NAME_LENGTH - 8] + hashlib.sha256(name.encode()).hexdigest()[:8]
