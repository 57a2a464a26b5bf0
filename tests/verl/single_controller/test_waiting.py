"""Waiting for workers: calls side by side, and one typed line for every way in which Ray ends a call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import exceptions

from verl.errors import NumericalError, Stalled, WorkerDied
from verl.single_controller import ResourcePool, WorkerGroup, waiting
from verl.single_controller.waiting import as_verl_error, wait_beside, wait_for_start

LONG_S = 60.0


class Player:
    """Each rank plays for so long, and may end badly."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    def play(self, seconds: float, fails: bool = False) -> None:
        time.sleep(seconds * (self.rank + 1))
        if fails and self.rank == 0:
            raise NumericalError("not finite")

    def meet(self, folder: Path, group: str) -> int:
        """Returns when all four players are here."""
        (folder / f"{group} {self.rank}").touch()
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.01)
        return self.rank


class First(Player): ...


class Second(Player): ...


Groups = tuple[WorkerGroup, WorkerGroup]


@pytest.fixture(scope="module")
def groups(ray_session: object) -> Iterator[Groups]:
    pool = ResourcePool(1, 2, "cpu")
    first, second = (WorkerGroup(kind, pool, timeout_s=LONG_S, env_vars={}) for kind in (First, Second))
    for group in (first, second):
        group.call_all("play", 0.0)  # the processes are there
    yield first, second
    for group in (first, second):
        group.shutdown()


def test_they_work_at_the_same_time(groups: Groups, tmp_path: Path) -> None:
    first, second = groups
    other = second.begin_all("meet", tmp_path, "second")
    assert wait_beside(first.begin_all("meet", tmp_path, "first"), [other]) == other() == [0, 1]


def test_the_failure_of_either_is_raised_while_the_other_is_at_work(groups: Groups) -> None:
    began, (first, second) = time.monotonic(), groups
    with pytest.raises(NumericalError, match="not finite"):
        wait_beside(first.begin_all("play", LONG_S), [second.begin_all("play", 0.1, True)])
    with pytest.raises(Stalled, match=r"First.play: no answer within 1 s"):
        wait_beside(first.begin_all("play", 0.0, timeout_s=1.0), [])  # its workers are busy, here and below
    assert time.monotonic() - began < LONG_S / 2


def test_a_worker_that_dies_beside_a_call_is_named(groups: Groups) -> None:
    began, (first, second) = time.monotonic(), groups
    other = second.begin_all("play", LONG_S)
    killer = threading.Timer(0.5, second.shutdown)
    killer.start()
    with pytest.raises(WorkerDied, match=r"Second.play: a worker process ended"):
        wait_beside(first.begin_all("play", LONG_S), [other])
    killer.join()
    assert time.monotonic() - began < LONG_S / 2


# What Ray's constructors need, where it is not a text.
ARGUMENTS: dict[str, tuple[object, ...]] = {
    name: ("ab" * 28, None, "")
    for name in (
        *("ObjectLostError", "ObjectFetchTimedOutError", "ReferenceCountingAssertionError", "ObjectFreedError"),
        *("OwnerDiedError", "ObjectReconstructionFailedError", "PlasmaObjectNotAvailable"),
    )
} | {
    "ActorUnavailableError": ("lost", None),
    "ObjectReconstructionFailedError": ("ab" * 28, None, None, ""),
    "ActorDiedError": (),
    "RayActorError": (),
    "TaskPlacementGroupRemoved": (),
    "ActorPlacementGroupRemoved": (),
    "LocalRayletDiedError": (),
    "WorkerCrashedError": (),
    "TaskCancelledError": (),
}
OF_RAY = sorted(
    (
        kind
        for kind in vars(exceptions).values()
        if isinstance(kind, type)
        and issubclass(kind, exceptions.RayError)
        and not issubclass(kind, exceptions.RayTaskError | exceptions.GetTimeoutError | exceptions.CrossLanguageError)
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", OF_RAY)
def test_every_error_of_ray_becomes_one_typed_line(kind: type[exceptions.RayError]) -> None:
    """Also where a worker's own code met it, which is how one that waits for another one fails."""
    error = kind(*ARGUMENTS.get(kind.__name__, ("first line\nsecond line",)))
    inside = exceptions.RayTaskError("update", "a traceback", error)
    for raised in (error, inside, inside.as_instanceof_cause()):
        found = as_verl_error(raised, "ActorWorker.update", 60.0)
        assert isinstance(found, WorkerDied) and str(found).startswith("ActorWorker.update: ")
        assert len(str(found).splitlines()) == 1


SHORT_OF_MEMORY = """
import time
from verl.errors import WorkerDied
from verl.single_controller import ResourcePool, WorkerGroup, cluster

class Worker:
    def __init__(self, rank, world_size): pass
    def work(self): time.sleep(300)

cluster.connect(worker_logs=False)
try:
    WorkerGroup(Worker, ResourcePool(1, 1, "cpu"), timeout_s=200.0, env_vars={}).call_all("work")
except WorkerDied as error:
    print(error)
finally:
    cluster.disconnect()
"""


def test_what_ray_ends_for_want_of_memory_is_told_so() -> None:
    """With a limit that any machine exceeds; Ray would kill the same way at its own."""
    limit = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100", "RAY_ADDRESS": "local"}
    script = [sys.executable, "-c", SHORT_OF_MEMORY]
    done = subprocess.run(script, env=os.environ | limit, capture_output=True, text=True, timeout=280)
    [line] = done.stdout.splitlines()
    assert line.startswith("Worker.work: Ray ended a worker process because the machine was running out of memory. ")
    assert "exceeded threshold" in line and len(line) < 1000, line
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_process_that_never_starts_is_told_in_rays_words(
    ray_session: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Idle:
        pass

    remote = ray_session.remote(Idle)
    works = remote.options(num_cpus=0).remote()
    wait_for_start([works], "Idle", 60)
    monkeypatch.setattr(waiting, "START_S", 2.0)
    never = remote.options(num_cpus=0, runtime_env={"py_executable": "/no/such/python"}).remote()
    with pytest.raises(Stalled, match=r"^1 of 2 processes of Idle have not started after .* ends with: .*no/such"):
        wait_for_start([works, never], "Idle", 6)
    warned = [line for line in caplog.messages if "processes of Idle have not started" in line]
    assert warned and "/no/such/python: No such file or directory" in warned[-1]
    for worker in (works, never):
        ray_session.kill(worker)
