"""A server that a run starts on its node: it is there before the engines, and gone after them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_world import free_port

from verl.config import Config, load_config
from verl.errors import EnvironmentUnavailable
from verl.rollout.node_retriever import NodeRetrievers
from verl.single_controller import ResourcePool, node_server, wait_for
from verl.single_controller.node_server import Launch, NodeServer

POOL = ResourcePool(1, 1, "cpu")


def config_of(port: int, launch: str) -> Config:
    own = ["retriever.placement=per_node", f"retriever.launch='{launch}'", f"retriever.url=http://127.0.0.1:{port}/r"]
    return load_config("tinywiki", ["actor_rollout_ref.model.path=m", *own])


def test_it_serves_from_the_run_s_folder_until_the_run_ends(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    (tmp_path / "page").write_text("found")
    monkeypatch.chdir(tmp_path)
    retrievers = NodeRetrievers(config_of(port, f"NAME=x; python3 -m http.server --bind 127.0.0.1 {port}"))
    ready = retrievers.ready_at(POOL, 0)
    assert retrievers.ready_at(POOL, 0) is ready, "one for all engines of a node"
    [log] = wait_for([ready], "waiting", 60)
    address = f"http://127.0.0.1:{port}/page"
    assert urllib.request.urlopen(address, timeout=10).read() == b"found" and Path(log).is_file()
    retrievers.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=10)


def test_a_run_that_ends_before_it_listens_ends_all_that_it_has_started(ray_session: Any, tmp_path: Path) -> None:
    """Also what bash alone would leave, such as a part of a pipeline."""
    os.mkfifo(told := tmp_path / "pid")
    retrievers = NodeRetrievers(config_of(free_port(), f"(echo $BASHPID > {told}; exec sleep 60) 2>&1 | cat"))
    retrievers.ready_at(POOL, 0)
    server = psutil.Process(int(told.read_text()))
    retrievers.close()
    assert has_ended(server)


def test_a_server_that_does_not_heed_sigterm_is_killed_though_its_bash_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "GRACE_S", 0.5)
    os.mkfifo(told := tmp_path / "pid")
    command = f"(trap '' TERM; echo $BASHPID > {told}; exec sleep 60) 2>&1 | cat"
    launch = Launch(command, "127.0.0.1", free_port(), "server", "launch", "", "", EnvironmentUnavailable)
    started = NodeServer(launch)
    server = psutil.Process(int(told.read_text()))
    guards = guards_of(started)
    assert guards
    started.end()
    assert has_ended(server)
    assert not psutil.wait_procs(guards, timeout=60)[1], "nothing stays that would end another group of that number"


OWNER = """
import sys, time
from verl.errors import EnvironmentUnavailable
from verl.single_controller.node_server import Launch, NodeServer
started = NodeServer(Launch(sys.argv[1], "127.0.0.1", int(sys.argv[2]), "server", "", "", "", EnvironmentUnavailable))
time.sleep(600)
"""


@pytest.mark.parametrize("command", ["{server}", "({server}) 2>&1 | cat", "({server}) & wait"])
def test_a_server_ends_with_its_actor_even_if_that_is_killed(command: str, tmp_path: Path) -> None:
    """Whatever processes bash has made of the command."""
    os.mkfifo(told := tmp_path / "pid")
    launch = command.format(server=f"echo $BASHPID > {told}; exec sleep 600")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, launch, str(free_port())])
    server = psutil.Process(int(told.read_text()))
    assert not has_ended(server)
    owner.kill()
    owner.wait()
    assert_ends(server)


KILLED_AT_ONCE = """
import os, subprocess
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "start_new_session" in options and options["stdin"] == subprocess.DEVNULL:
            os.kill(os.getpid(), 9)
subprocess.Popen = Popen
"""


def test_a_server_ends_with_its_actor_even_if_that_is_killed_once_it_has_started_it(tmp_path: Path) -> None:
    os.mkfifo(told := tmp_path / "pid")
    launch = f"echo $BASHPID > {told}; exec sleep 600"
    owner = subprocess.Popen([sys.executable, "-c", KILLED_AT_ONCE + OWNER, launch, str(free_port())])
    server = psutil.Process(int(told.read_text()))
    assert owner.wait() == -signal.SIGKILL
    assert_ends(server)


def assert_ends(server: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while not has_ended(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert has_ended(server)


def guards_of(started: NodeServer) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if (one.info["cmdline"] or [])[2:] == [node_server.GUARD, str(started._log)]]


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody waits for it: its parent has ended, too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_command_that_ends_is_an_error_with_its_last_words_to_whoever_waits(ray_session: Any) -> None:
    """To an engine too, as a method has it that is given the reference."""

    @ray_session.remote
    def engine(retriever: object) -> object:
        return retriever

    retrievers = NodeRetrievers(config_of(free_port(), "echo there is no index; exit 3"))
    ready = retrievers.ready_at(POOL, 0)
    for waiting in (ready, engine.remote(ready)):
        with pytest.raises(EnvironmentUnavailable, match=r"ended with status 3; .*\nthere is no index$"):
            wait_for([waiting], "waiting", 60)
    retrievers.close()


def test_it_sees_no_gpu(ray_session: Any) -> None:
    """Those of its node are for the roles: a dense retriever would take memory of the first one."""
    retrievers = NodeRetrievers(config_of(free_port(), "printenv CUDA_VISIBLE_DEVICES; echo status $?; exit 3"))
    with pytest.raises(EnvironmentUnavailable, match=r"the end of its log .*:\nstatus 0$"):
        wait_for([retrievers.ready_at(POOL, 0)], "waiting", 60)
    retrievers.close()


def test_a_server_that_is_there_already_is_not_taken_for_its_own(ray_session: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        retrievers = NodeRetrievers(config_of(port, "exit 5"))
        with pytest.raises(EnvironmentUnavailable, match=f"something listens at 127.0.0.1:{port} already"):
            wait_for([retrievers.ready_at(POOL, 0)], "waiting", 60)
        retrievers.close()


def test_none_is_started_where_none_is_asked_for() -> None:
    assert NodeRetrievers(load_config("tinywiki", ["actor_rollout_ref.model.path=m"])).ready_at(POOL, 0) is None
