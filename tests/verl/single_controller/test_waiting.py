"""Calls of two groups of workers side by side: both are begun first, and the failure of either is told at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.errors import NumericalError, Stalled, WorkerDied
from verl.single_controller import ResourcePool, WorkerGroup
from verl.single_controller.waiting import wait_beside

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
