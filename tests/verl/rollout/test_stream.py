"""The queue for several engines, where Ray begins calls in another order than they were sent in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from late_workers import LateWorker, OneShort

from verl.config import load_config
from verl.errors import SamplingAbandoned
from verl.protocol import Prompt
from verl.rollout.episode_queue import EpisodeQueue, Group, Stream, groups_of
from verl.rollout.fleet import Engine

SEAT: Any = SimpleNamespace(address="", rank=0)


@pytest.fixture(scope="module")
def worker(ray_session: Any) -> Iterator[Any]:
    worker = ray_session.remote(LateWorker).options(max_concurrency=8).remote()
    yield worker
    ray_session.kill(worker)


def test_a_call_that_begins_after_it_was_abandoned_is_ended_too(ray_session: Any, worker: Any) -> None:
    engine = Engine(worker, SEAT, None, at_once=2)
    config = load_config("ppo_trainer", ["data.train_files=a", "data.val_files=b"])
    queue = EpisodeQueue(config, groups_of([Prompt((1, 2), "test", {})], ["train"] * 2, 1), 1)
    abandoned = threading.Event()
    stream = Stream(SimpleNamespace(engines=[engine]), queue, 60.0, abandoned)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            stream.run()
        except SamplingAbandoned as error:
            stream.abandon()
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    ray_session.get(worker.called.remote())
    abandoned.set()
    begun = time.monotonic()
    ray_session.get(worker.abandon.remote())
    thread.join(30)
    assert ray_session.get(worker.state.remote()) == (1, False), "its episodes are still there"
    assert len(raised) == 1 and time.monotonic() - begun < 8


def test_nothing_is_waited_for_for_long(ray_session: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that begins nothing within the time is left to those who end it."""
    monkeypatch.setattr("verl.rollout.episode_queue.SHUTDOWN_S", 1.0)
    ray_session.get(worker.delay.remote(60.0))
    engine = Engine(worker, SEAT, None, at_once=2)
    stream = Stream(SimpleNamespace(engines=[engine]), SimpleNamespace(), 60.0, threading.Event())
    stream._calls[worker.play.remote([])] = (stream.assignments[0], 0.0)
    begun = time.monotonic()
    stream.abandon()
    assert time.monotonic() - begun < 10


@pytest.fixture(scope="module")
def one_short(ray_session: Any) -> Iterator[Engine]:
    engine = Engine(ray_session.remote(OneShort).remote(), SEAT, None, at_once=8)
    yield engine
    ray_session.kill(engine.worker)


def fed(engine: Engine, prompts: Sequence[int], answers: int) -> tuple[list[tuple[int, bool]], list[Group]]:
    """The calls of `next_groups` from the first complete group on, if it has enough after `answers`; the groups."""
    config = load_config("ppo_trainer", ["data.train_files=a", "data.val_files=b"])
    told: list[tuple[int, bool]] = []

    def next_groups(complete: Sequence[Group], wait: bool) -> list[Group] | None:
        if complete or told:
            told.append((len(complete), wait))
        return None if len(told) == answers else []

    groups = groups_of([Prompt((number,), "test", {}) for number in prompts], ["train"] * 2, 1)
    Stream(
        SimpleNamespace(engines=[engine]), EpisodeQueue(config, groups, 1, next_groups), 60.0, threading.Event()
    ).run()
    return told, groups


def test_a_decision_that_takes_time_is_heard_of_while_another_group_is_sampled(one_short: Engine) -> None:
    told, [first, second] = fed(one_short, (1, 2), answers=4)
    assert told == [(1, False), (0, False), (0, False), (0, False)]
    assert len(first.results) == 2 and not second.results


def test_a_decision_is_waited_for_when_nothing_is_sampled(one_short: Engine) -> None:
    told, _ = fed(one_short, (1,), answers=4)
    assert told == [(1, True)], "it has to decide, and wants no other group"
