"""Calls of two groups of workers side by side: both are begun first, and the failure of either is told at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from verl.errors import NumericalError, Stalled, WorkerDied
from verl.single_controller import ResourcePool, WorkerGroup
from verl.single_controller.waiting import wait_beside

LONG_S = 60.0


class Player:
    """Each rank plays for so long, and may end badly."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    def play(self, seconds: float, fails: bool = False) -> tuple[int, float, float]:
        began = time.time()
        time.sleep(seconds * (self.rank + 1))
        if fails and self.rank == 0:
            raise NumericalError("not finite")
        return self.rank, began, time.time()


class First(Player): ...


class Second(Player): ...


Groups = tuple[WorkerGroup, WorkerGroup]


@pytest.fixture
def groups(ray_session: Any) -> Iterator[Groups]:
    pool = ResourcePool(1, 2, "cpu")
    first, second = (WorkerGroup(kind, pool, timeout_s=LONG_S, env_vars={}) for kind in (First, Second))
    for group in (first, second):
        group.call_all("play", 0.0)  # the processes are there
    yield first, second
    for group in (first, second):
        group.shutdown()


def test_they_work_at_the_same_time(groups: Groups) -> None:
    first, second = groups
    other = second.begin_all("play", 1.0)
    results = wait_beside(first.begin_all("play", 1.0), [other])
    assert [rank for rank, *_ in results] == [0, 1]
    for (_, began, ended), (_, other_began, other_ended) in zip(results, other(), strict=True):
        assert max(began, other_began) < min(ended, other_ended)


def test_the_failure_of_either_is_raised_while_the_other_is_at_work(groups: Groups) -> None:
    began, (first, second) = time.monotonic(), groups
    with pytest.raises(NumericalError, match="not finite"):
        wait_beside(first.begin_all("play", LONG_S), [second.begin_all("play", 0.1, True)])
    with pytest.raises(Stalled, match=r"First.play: no answer within 1 s"):
        wait_beside(first.begin_all("play", 0.0, timeout_s=1.0), [])  # its workers are busy
    assert time.monotonic() - began < LONG_S / 2


def test_a_worker_that_dies_beside_a_call_is_named(groups: Groups) -> None:
    began, (first, second) = time.monotonic(), groups
    other = second.begin_all("play", LONG_S)
    killer = threading.Timer(1.0, second.shutdown)
    killer.start()
    with pytest.raises(WorkerDied, match=r"Second.play: a worker process ended"):
        wait_beside(first.begin_all("play", LONG_S), [other])
    killer.join()
    assert time.monotonic() - began < LONG_S / 2
