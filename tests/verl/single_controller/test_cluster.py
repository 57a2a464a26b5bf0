"""Joining a Ray cluster that is not there, or asks for a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ENV, ROOT, free_port

from verl.errors import WorkerError
from verl.single_controller import cluster


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:{port}", "Connection refused"), ("ray://127.0.0.1:{port}", "refused"), ("head", "not host:port")],
)
def test_a_cluster_that_is_not_there_is_told_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(WorkerError, match=f"RAY_ADDRESS={address} cannot be joined .*{message}.* ray start --head"):
        cluster.connect(worker_logs=False)


@pytest.mark.parametrize(
    ("error", "message", "attempts"),
    [
        (
            Exception("The current node timed out during startup. This ..."),
            "timed out during startup.*/ray/session_latest/logs; .*raylet.err",
            3,
        ),
        (ValueError("no"), "could not be started on this machine: no", 1),
    ],
)
def test_a_start_that_takes_too_long_is_tried_again(
    error: Exception, message: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception 30 s after it has begun."""
    tried = []

    def init(**settings: object) -> None:
        tried.append(settings)
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    with pytest.raises(WorkerError, match=message):
        cluster.connect(worker_logs=False)
    assert len(tried) == attempts


def test_a_token_that_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("no") from RuntimeError("RPC error: InvalidAuthToken: ...")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(WorkerError, match="RAY_AUTH_MODE=token"):
        cluster.connect(worker_logs=False)


WORKERS_PYTHON = """
import sys
import ray
from verl.single_controller.cluster import connect, disconnect
connect(worker_logs=False)
own = ray.remote(lambda: sys.executable).options(runtime_env={"env_vars": {"ANY": "1"}})
print(ray.get(own.remote(), timeout=200))
print(ray.get_runtime_context().gcs_address)
disconnect()
"""


def test_a_run_has_a_ray_of_its_own_also_from_a_folder_with_a_space(tmp_path: Path, ray_session: Any) -> None:
    """And with an accent: Ray's workers are started with the Python that is there. No cluster that runs is joined."""
    folder = tmp_path / "d'\u00e9 \u6cb3"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)
    command = [str(folder / "venv/bin/python"), "-c", WORKERS_PYTHON]
    env = {name: value for name, value in ENV.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines()[:1] == command[:1], done.stderr[-4000:]
    assert done.stdout.splitlines()[1] != ray_session.get_runtime_context().gcs_address


def test_a_run_on_several_nodes_joins_the_cluster_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ray_session: Any
) -> None:
    """That is named; and if there is none, so is the reason."""
    asked = []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(cluster.ray, "init", lambda **settings: asked.append(settings["address"]))
    with caplog.at_level("INFO"):
        cluster.connect(worker_logs=False, num_nodes=2)
    assert asked == ["auto"]
    assert f"the Ray cluster at {ray_session.get_runtime_context().gcs_address}" in caplog.text

    def init(**settings: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(WorkerError, match=r"on this machine \(there is no RAY_ADDRESS\) cannot be joined \(Could not"):
        cluster.connect(worker_logs=False, num_nodes=2)
