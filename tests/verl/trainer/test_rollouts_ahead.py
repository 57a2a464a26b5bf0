"""Sampling ahead of the loop: real threads, with stand-ins for the engines, the actor and what is collected."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from verl.errors import EnvironmentUnavailable, SamplingAbandoned, WeightsInTraining, WeightSyncError
from verl.phases import Phase
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.tracking.timing import Timer
from verl.trainer.collection import Collected
from verl.trainer.rollouts_ahead import RolloutsAhead
from verl.trainer.sampling_state import SamplingState
from verl.trainer.staleness import staleness_metrics

DEADLINE_S = 60.0


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

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE_S), "no batch was begun"


def trajectory(step: int, number: int, version: int) -> Trajectory:
    segments = [Segment(Source.PROMPT, (1,)), Segment(Source.POLICY, (2,), (-1.0,))]
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


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.source.close()
        assert not any(thread.name == "rollouts-ahead" for thread in threading.enumerate()), "a thread is left"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_one_step_off_samples_the_next_step_with_the_weights_before_the_update(world: Callable[..., World]) -> None:
    """Sampled with versions 0, 0, 1, 2: when step n is sampled, step n - 1 is being trained."""
    one = world(1, 4)
    one.sampler.permits.release()
    taken = [one.take(1)]
    for step in (1, 2, 3):
        one.sampler.wait_until_begun()
        until(lambda step=step: one.sampler.versions[-1][0] == step + 1)  # type: ignore[misc]
        one.train(step)
        one.sampler.permits.release()
        taken.append(one.take(step + 1))
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert one.sampler.versions == [(1, 0), (2, 0), (3, 1), (4, 2)]
    assert one.source.take and one.rollouts.version == 3


def test_a_step_says_how_old_its_weights_are(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    first = one.take_all(1)
    until(lambda: len(one.sampler.versions) == 2)
    one.train(1)
    second = one.take_all(2)
    found = [staleness_metrics(c.sampled, step, 1) for step, c in ((1, first), (2, second))]
    assert found == [
        {"rollout/staleness/mean": 0.0, "rollout/staleness/max": 0.0},
        {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 1.0},
    ]
    assert {"rollout/idle_s", "rollout/collect_s", "rollout/num_engines"} <= second.metrics.keys()
    with pytest.raises(WeightSyncError, match=r"step 2: 2 of 2 .* by version 0 .* only 1 to 1 .*max_staleness"):
        staleness_metrics(second.sampled, 2, 0)


def test_the_mean_age_of_weights() -> None:
    """Step 5 trains version 4: versions 4, 3, 3, 2 are 0, 1, 1 and 2 behind."""
    found = [trajectory(5, number, version) for number, version in enumerate((4, 3, 3, 2))]
    assert staleness_metrics(found, 5, 2) == {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 2.0}
    with pytest.raises(WeightSyncError, match="step 5: 1 of 1"):
        staleness_metrics([trajectory(5, 0, 5)], 5, 2)  # weights from the future


def test_no_more_is_sampled_ahead_than_the_bound_allows(world: Callable[..., World]) -> None:
    one = world(2, 9, free=True)
    one.take(1)
    until(lambda: one.sampler.versions == [(1, 0), (2, 0), (3, 0)])
    time.sleep(0.05)  # a fourth would be begun by now
    assert len(one.sampler.versions) == 3
    one.train(1)
    until(lambda: one.sampler.versions[3:] == [(4, 1)])


def test_with_a_bound_of_two_the_loop_does_not_wait_for_a_batch_that_it_does_not_need_yet(
    world: Callable[..., World],
) -> None:
    """Step 2 is ready when step 1 is trained, and step 3 is being sampled: step 2 is taken, and version 1 loaded later."""
    one = world(2, 5)
    for _ in range(2):
        one.sampler.permits.release()
    one.take(1)
    for _ in range(3):
        one.sampler.wait_until_begun()
    one.train(1)
    assert one.take(2) == [2, 3] and one.rollouts.version == 0 and one.rollouts.sampling
    one.train(2)
    one.sampler.permits.release()
    assert one.take(3) == [4, 5]
    until(lambda: one.sampler.versions[3:] == [(4, 2)])  # the newest, version 1 was never loaded


@pytest.mark.parametrize("most", [1, 2, 3])
def test_whatever_takes_how_long_every_prompt_is_trained_once_and_in_order(
    world: Callable[..., World], most: int
) -> None:
    """`take` checks the bound, the stand-ins that weights change only between batches and are exported whole."""
    one, last, draw = world(most, 40, free=True), 40, random.Random(most)
    taken: list[int] = []
    for step in range(1, last + 1):
        taken += one.take(step)
        one.train(step, draw.choice([0.0, 0.001, 0.004]), hold=step % 7 == 0)
        if step % 7 == 0:
            with one.source.engines(one.timer):
                assert one.rollouts.version == step
    assert taken == list(range(2 * last))


def test_a_validation_has_the_engines_and_the_newest_weights_to_itself(world: Callable[..., World]) -> None:
    one = world(2, 5)
    one.sampler.permits.release()
    one.take(1)
    one.sampler.wait_until_begun()
    one.sampler.wait_until_begun()
    one.train(1, hold=True)
    one.sampler.permits.release()
    with one.source.engines(one.timer):
        assert one.rollouts.version == 1 and not one.rollouts.sampling
        begun = len(one.sampler.versions)
        time.sleep(0.05)
        assert len(one.sampler.versions) == begun
    until(lambda: one.sampler.versions[-1] == (3, 1))


def test_a_failure_is_raised_by_the_step_that_it_belongs_to(world: Callable[..., World]) -> None:
    one = world(2, 5, free=True)
    one.sampler.failing[3] = EnvironmentUnavailable("the retriever is gone")
    one.take(1)
    one.train(1)
    assert one.take(2) == [2, 3]
    one.train(2)
    for _ in range(2):
        with pytest.raises(EnvironmentUnavailable, match="the retriever is gone"):
            one.take(3)


def test_what_collapsed_weights_sampled_is_thrown_away_and_its_prompts_are_not(world: Callable[..., World]) -> None:
    one = world(2, 6)
    for _ in range(2):
        one.sampler.permits.release()
    one.take(1)
    for _ in range(3):  # step 2 is ready, step 3 is being sampled
        one.sampler.wait_until_begun()
    one.train(1)
    one.source.discard(1, one.timer)
    one.sampler.permits.release(8)
    taken = []
    for step in range(2, 7):
        taken += one.take(step)
        one.train(step)
    assert taken == list(range(2, 12))
    assert one.sampler.versions[3] == (2, 1)


def test_the_step_that_was_being_sampled_alone_is_sampled_again(world: Callable[..., World]) -> None:
    one = world(1, 3)
    one.sampler.permits.release()
    one.take(1)
    one.sampler.wait_until_begun()
    one.sampler.wait_until_begun()
    one.train(1)
    one.source.discard(1, one.timer)
    one.sampler.permits.release(2)
    assert one.take(2) == [2, 3] and (2, 1) in one.sampler.versions


def test_the_last_step_can_be_thrown_away_too(world: Callable[..., World]) -> None:
    """The thread has nothing left to sample then, and has to go back to it."""
    one = world(1, 2, free=True)
    one.take(1)
    until(lambda: len(one.sampler.versions) == 2 and not one.rollouts.sampling)
    one.train(1)
    one.source.discard(1, one.timer)
    assert one.take(2) == [2, 3] and one.sampler.versions[-1] == (2, 1)


def test_a_resumed_run_samples_again_what_was_sampled_ahead(world: Callable[..., World]) -> None:
    """Saved after step 2, while step 3 is ready and step 4 is being sampled: it goes on with the prompts of step 3."""
    one = world(2, 9)
    one.sampler.permits.release(3)
    one.take(1)
    one.train(1)
    one.take(2)
    until(lambda: len(one.sampler.versions) == 4)
    one.train(2)
    saved = one.source.state().to_json()
    assert saved["prompts"] == {"position": 4}
    resumed = world(2, 9, free=True, first=2)
    SamplingState.from_json(saved).put_back(resumed.sampler.prompts)  # type: ignore[arg-type]
    assert resumed.take(3) == [4, 5] and resumed.sampler.versions[0] == (3, 2)


def test_a_reward_draws_the_same_after_a_resume(world: Callable[..., World]) -> None:
    one = world(1, 3)
    drawn: list[float] = []
    collect = one.sampler.collect
    one.sampler.collect = lambda step: (collect(step), drawn.append(random.random()))[0]  # type: ignore[method-assign]
    one.sampler.permits.release(2)
    one.take(1)
    until(lambda: len(drawn) == 2)  # step 2's
    SamplingState.from_json(one.source.state().to_json()).put_back(Prompts())  # type: ignore[arg-type]
    assert random.random() == drawn[1]


def test_before_anything_was_sampled_the_state_is_that_of_the_prompts(world: Callable[..., World]) -> None:
    one = world(1, 3)
    one.sampler.prompts.next(6)
    assert one.source.state().prompts == {"position": 6}


def test_engines_that_were_started_anew_wait_for_weights_that_are_not_in_training(world: Callable[..., World]) -> None:
    """The thread may not export them. The batch is sampled with the same prompts when the loop has loaded them; one that
    is ready stays.
    """
    one = world(2, 4, free=True)
    collect, died = one.sampler.collect, threading.Event()

    def dying(step: int) -> Collected:
        collected = collect(step)
        if step == 3 and not died.is_set():
            died.set()
            one.rollouts.publish()  # what the manager does when it has started the last engine anew
        return collected

    one.sampler.collect = dying  # type: ignore[method-assign]
    one.take(1)
    assert died.wait(DEADLINE_S)
    assert one.sampler.versions == [(1, 0), (2, 0), (3, 0)]
    one.train(1)
    assert one.take(2) == [2, 3] and one.take(3) == [4, 5]
    assert one.sampler.versions[3] == (3, 1)


def test_weights_are_loaded_for_a_loop_that_waits_for_such_a_batch(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    one.sampler.failing[1] = WeightsInTraining("started anew")
    assert one.take(1) == [0, 1]


def test_closing_ends_a_collection(world: Callable[..., World]) -> None:
    one = world(1, 3)
    one.sampler.permits.release()
    one.take(1)
    one.sampler.wait_until_begun()
    one.source.close()
    until(lambda: not one.rollouts.sampling)


def test_the_thread_ends_by_itself_when_all_is_sampled_and_taken(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    for step in (1, 2):
        one.take(step)
        one.train(step, hold=step == 2)
    until(lambda: not any(thread.name == "rollouts-ahead" for thread in threading.enumerate()))
    with one.source.engines(one.timer):
        assert one.rollouts.version == 2
