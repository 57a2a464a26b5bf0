"""A machine whose home folder cannot be written, or whose temporary folder has a long path."""

from __future__ import annotations

import os
import pwd
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from run_config import run_config

from verl.errors import ConfigError, WorkerError
from verl.process.storage import CACHES, MAX_SOCKET_PATH, folder_for_sockets, work_without_home
from verl.run.resuming import check_start
from verl.single_controller.cluster import SOCKET, ray_folder, shorten_socket_paths

VARIABLES = (*CACHES, "HF_HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR", "TMPDIR")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without those that matter; whatever is set is undone."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_without_a_home_caches_and_token_go_elsewhere(
    variables: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables.setattr(tempfile, "tempdir", str(tmp_path))
    variables.setenv("HOME", "/proc/no-home")
    variables.setenv("MPLCONFIGDIR", "of the user")
    work_without_home()
    folder = tmp_path / f"search-r1-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["XDG_CACHE_HOME"] == str(folder / "cache") and os.environ["MPLCONFIGDIR"] == "of the user"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert "HOME=/proc/no-home cannot be written" in caplog.text and "set HOME" in caplog.text


def test_a_user_without_a_home_and_without_a_name_gets_the_same(
    variables: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the number that a cluster gives a container's process: there is no line for it in /etc/passwd."""
    variables.setattr(tempfile, "tempdir", str(tmp_path))
    variables.delenv("HOME", raising=False)
    variables.setattr(pwd, "getpwuid", lambda number: {}[f"getpwuid(): uid not found: {number}"])
    work_without_home()
    assert os.environ["XDG_CACHE_HOME"].startswith(str(tmp_path)) and "set HOME" in caplog.text


def test_a_home_that_can_be_written_is_used(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables.setenv("HOME", str(tmp_path))
    work_without_home()
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_ray_gets_a_short_folder_for_its_sockets(
    variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fits = "/" + "f" * (MAX_SOCKET_PATH - len(f"//ray/{SOCKET}"))
    variables.setenv("TMPDIR", fits)
    shorten_socket_paths()
    assert ray_folder() == Path(fits) / "ray" and not caplog.records
    assert len(str(ray_folder() / SOCKET)) == MAX_SOCKET_PATH

    variables.setenv("TMPDIR", fits + "f")
    shorten_socket_paths()
    assert ray_folder() == Path("/tmp/ray") and f"{fits}f is too long for Ray's sockets" in caplog.text

    variables.setenv("RAY_TMPDIR", fits[:-1] + "é")
    with pytest.raises(WorkerError, match=f"set RAY_TMPDIR to .* at most {len(fits)} bytes"):
        shorten_socket_paths()


def test_other_sockets_get_a_short_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "f" * (MAX_SOCKET_PATH - 5))
    assert folder_for_sockets("abc") == Path(tempfile.tempdir) and folder_for_sockets("abcd") == Path("/tmp")


def test_a_port_in_use_is_told_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = [f"trainer.metrics_port={port}", f"trainer.default_local_dir={tmp_path}"]
        with pytest.raises(ConfigError, match=f"trainer.metrics_port={port} .* cannot be served .*another port"):
            check_start(run_config(settings).trainer)
    check_start(run_config(settings).trainer)
