"""A loop's view of sampling that runs ahead, with stand-ins for the engines, the actor and what is collected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import SamplingAbandoned
from verl.phases import Phase
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.tracking.spans import Timer
from verl.trainer.sampling.collection import Collected, staleness_metrics
from verl.trainer.sampling.rollouts_ahead import RolloutsAhead

DEADLINE_S = 60.0
LOOK_S = 1.0


class Changed(threading.Condition):
    """That of `RolloutsAhead`. Where nothing will change any more, the loop gets an error, and the test does not hang.

    Nobody but the loop and the thread that samples says that something has changed: each is the only hope of the other.
    """

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self.thread, self.num_waiting, self.num_changes, self.is_dead = thread, 0, 0, False

    def wait(self, timeout: float | None = None) -> bool:
        seen = self.num_changes
        self.num_waiting += 1
        if self.num_waiting == 2:
            self.is_dead = True
            super().notify_all()
        while self.num_changes == seen and not self.is_dead:
            super().wait(LOOK_S)
            self.is_dead |= self.num_changes == seen and not self.thread.is_alive()
        assert not self.is_dead, "the loop and the thread that samples wait for one another"
        return True

    def notify_all(self) -> None:
        self.num_changes += 1
        self.num_waiting = 0
        super().notify_all()


class Prompts:
    """Numbers, endlessly."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, n: int) -> list[int]:
        self.position += n
        return list(range(self.position - n, self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Actor:
    """Its weights are a number. `training` while the loop changes them."""

    training = False

    def publish_weights(self, version: int) -> int:
        assert not self.training, "weights were exported while they changed"
        return version

    def note_memory(self, phase: Phase) -> None:
        pass


class Engines:
    num_engines = 1

    def __init__(self) -> None:
        self.version: int | None = None
        self.publish: Callable[[], Any] = lambda: None
        self.sampling = False
        self.abandoned = threading.Event()

    def load_weights(self, publish: Callable[[], int]) -> None:
        assert not self.sampling, "weights were loaded while a batch was sampled"
        self.version, self.publish = publish(), publish

    def abandon(self) -> None:
        self.abandoned.set()

    def allow(self) -> None:
        self.abandoned.clear()


class Sampler:
    """Collects two prompts a step, once `go` lets it: one permit a batch, or none needed where it is `free`."""

    def __init__(self, engines: Engines, free: bool = False) -> None:
        self.engines, self.prompts, self.free = engines, Prompts(), free
        self.permits = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.versions: list[tuple[int, int | None]] = []  # (step, version) in the order they were begun
        self.failing: dict[int, BaseException] = {}

    def collect(self, step: int) -> Collected:
        engines = self.engines
        drawn = self.prompts.next(2)
        engines.sampling = True
        try:
            self.versions.append((step, engines.version))
            self.begun.release()
            version = engines.version
            while not self.free and not self.permits.acquire(timeout=0.01):
                if engines.abandoned.is_set():
                    raise SamplingAbandoned("nobody wants it")
            if step in self.failing:
                raise self.failing.pop(step)
            assert engines.version == version, "a batch has one version"
        finally:
            engines.sampling = False
        trajectories = [trajectory(step, number, version or 0) for number in drawn]
        return Collected(trajectories, trajectories, TrainBatch.from_trajectories(trajectories))

    def state_dict(self) -> dict[str, int]:
        return self.prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.prompts.load_state_dict(state)

    def forget(self) -> None:
        pass

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE_S), "no batch was begun"


def trajectory(step: int, number: int, version: int) -> Trajectory:
    segments = [Segment(Source.PROMPT, (1,)), Segment(Source.POLICY, (2,), (-1.0,), ((version, 1),))]
    found = Trajectory(f"train-{step}-{number}", Prompt((1,), "test", {"number": number}), segments, Status.ANSWERED)
    found.reward, found.weight_version = 1.0, version
    return found


class World:
    """A loop's view: a source, and what it was made of."""

    def __init__(self, max_staleness: int, last_step: int, free: bool = False, first: int = 0) -> None:
        self.actor, self.rollouts, self.timer = Actor(), Engines(), Timer()
        self.sampler = Sampler(self.rollouts, free)
        self.max_staleness = max_staleness
        self.source = RolloutsAhead(
            self.sampler,  # type: ignore[arg-type]
            self.rollouts,  # type: ignore[arg-type]
            self.actor,  # type: ignore[arg-type]
            max_staleness,
            last_step,
        )
        self.source._changed = Changed(self.source._thread)
        self.source.load(first)

    def take(self, step: int) -> list[int]:
        """The prompts of the step, whose staleness is checked."""
        return numbers(self.take_all(step))

    def take_all(self, step: int) -> Collected:
        collected = self.source.take(step, self.timer)
        staleness_metrics(collected.sampled, step, self.max_staleness)
        return collected

    def train(self, step: int, seconds: float = 0.0, hold: bool = False) -> None:
        self.actor.training = True
        time.sleep(seconds)
        self.actor.training = False
        self.source.renew(step, self.timer, hold)


def numbers(collected: Collected) -> list[int]:
    return [found.prompt.row["number"] for found in collected.sampled]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
