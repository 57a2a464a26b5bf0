"""Joining a Ray cluster that is not there, or asks for a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        (Exception("The current node timed out during startup. This ..."), "timed out during startup", 3),
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
disconnect()
"""


def test_a_clone_may_be_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """And with an accent: Ray's workers are started with the Python that is there."""
    folder = tmp_path / "d'\u00e9 \u6cb3"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)
    command = [str(folder / "venv/bin/python"), "-c", WORKERS_PYTHON]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines() == command[:1], done.stderr[-4000:]
