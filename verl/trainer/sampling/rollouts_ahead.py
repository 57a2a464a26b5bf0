"""Asynchronous RL: a thread samples the next steps while the loop trains.

The loop makes version n of the weights in step n. The batch of step n is sampled with one version, the newest that the
loop had finished when its sampling began, and with none older than n - 1 - `max_staleness`: it is trained at most
`max_staleness` versions later. With 1 (one step off):

    engines   sample 1, v0 | sample 2, v0 | sample 3, v1 | sample 4, v2
    loop                   | train 1: v1  | train 2: v2  | train 3: v3

Weights are loaded between two batches, by the loop alone and at moments when it does not change them: the actor's ranks
serve one caller, and what they export is what they hold at that moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from verl.config import Config
from verl.config.rules.predicates import max_steps_ahead
from verl.errors import SamplingAbandoned, WeightsInTraining
from verl.phases import Phase
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_stream import WeightStream
from verl.tracking.spans import Timer
from verl.trainer.sampling.collection import Collected, Collector
from verl.trainer.sampling.rollout_source import InTurn, RolloutSource, SamplingState
from verl.workers.roles import ActorGroup


class IdleClock:
    """Adds up the seconds between `start` and `stop`, each of which may be called twice."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total_s = 0.0

    def start(self) -> None:
        self._since = self._since or time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._total_s += time.monotonic() - self._since
        self._since = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which the clock does not run, since something is done."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def read(self) -> float:
        """The idle seconds since the last call."""
        with self.stopped():
            total_s, self._total_s = self._total_s, 0.0
        return total_s


CLOSE_S = 10.0


def rollout_source(
    config: Config, collector: Collector, rollouts: RolloutManager, actor: ActorGroup, last_step: int
) -> RolloutSource:
    """The source that `trainer.async_rollout` selects."""
    if most := max_steps_ahead(config):
        return RolloutsAhead(collector, rollouts, actor, most, last_step)
    return InTurn(collector, rollouts, actor)


class RolloutsAhead:
    """A `RolloutSource` with a thread that has the prompts and the rewards to itself, and the engines while it samples.

    The thread starts with the first `take`. Its errors are raised in the loop, by the `take` of the step that it was
    sampling; earlier steps are still trained.
    """

    def __init__(
        self, collector: Collector, rollouts: RolloutManager, actor: ActorGroup, max_staleness: int, last_step: int
    ) -> None:
        self.collector, self.rollouts, self.actor = collector, rollouts, actor
        self.max_staleness, self.last_step = max_staleness, last_step
        self._thread = threading.Thread(target=self._work, name="rollouts-ahead", daemon=True)
        self._idle = IdleClock()
        self._changed = threading.Condition()  # whose lock guards all that follows
        self._ready = deque[tuple[int, Collected]]()
        self._before: dict[int, SamplingState] = {}  # of the steps that are ready or being sampled
        self._next = 0  # step to be sampled next, or now
        self._newest = 0  # version that the actor has
        self._loaded: int | None = None  # that of the engines; None where they have none, or one of no use
        self._sampling = self._closed = False
        self._held = False  # the loop wants the engines for itself
        self._waited_for = False  # the loop has nothing to train
        self._failure: BaseException | None = None

    def load(self, version: int) -> None:
        """Load the weights; to be called while nothing is sampled. Raises what `RolloutManager.load_weights` raises."""
        with self._idle.stopped():
            self.rollouts.load_weights(partial(self._publish, version))
        self._newest = self._loaded = version

    def take(self, step: int, timed: Timer) -> Collected:
        # While the loop has nothing to train, it loads new weights as soon as the thread is not sampling.
        with timed("gen"), self._changed:
            self._start_at(step)
            self._waited_for = True
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if not self._sampling:
                    self._load_newest()
                self._changed.wait()
        ready, collected = self._ready[0]
        assert ready == step, f"step {ready} was sampled, but step {step} is to be trained"
        # The thread goes on when the engines have the newest weights. A state that is saved from now on is that of the
        # next step, since this one will then have been trained.
        with timed("weight_sync"), self._changed:
            if not self._sampling:
                self._load_newest()
            self._waited_for = False
            self._ready.popleft()
            del self._before[step]
            collected.metrics["rollout/idle_s"] = self._idle.read()
            self._changed.notify_all()
        self.actor.note_memory(Phase.SAMPLE)
        return collected

    def renew(self, version: int, timed: Timer, hold: bool = False) -> None:
        with timed("weight_sync"), self._changed:
            self._newest, self._held = version, hold
            if not (hold or self._sampling):
                self._load_newest()

    @contextmanager
    def engines(self, timed: Timer) -> Iterator[None]:
        with timed("gen"), self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._sampling)
        with timed("weight_sync"):
            self._load_newest()
        with self._idle.stopped():
            yield
        self._release_engines()

    def discard(self, version: int, timed: Timer) -> None:
        with timed("gen"), self._changed:
            # End what is being sampled; the thread puts its prompts back.
            self._held = True
            self.rollouts.abandon()
            self._changed.wait_for(lambda: not self._sampling)
            self.rollouts.allow()
            # What is ready or carried over was sampled with the discarded weights; the engines still have these.
            if self._ready:
                self._sample_again(self._ready[0][0])
            self.collector.forget()
            self._newest, self._loaded = version, None
        with timed("weight_sync"):
            self._load_newest()
        self._release_engines()

    def state(self) -> SamplingState:
        with self._changed:
            return self._before[min(self._before)] if self._before else SamplingState.now(self.collector)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.rollouts.abandon()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _start_at(self, step: int) -> None:
        if not self._next:
            self._next = step
            self._idle.start()
            self._thread.start()

    def _load_newest(self) -> None:
        """Load the newest weights if the engines have others. The thread must be waiting, or have ended."""
        with self._changed:
            if self._loaded != self._newest:
                self.load(self._newest)
                self._changed.notify_all()

    def _release_engines(self) -> None:
        """Let the thread sample again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def _publish(self, version: int) -> WeightStream:
        """Offer the actor's weights to the engines. For the loop alone: it may be training when the thread asks, which
        does so for engines that were restarted.
        """
        if threading.current_thread() is self._thread:
            raise WeightsInTraining("the rollout engines were restarted and wait for the trainer's weights")
        return self.actor.publish_weights(version)

    def _work(self) -> None:
        try:
            while self._begin():
                self._sample()
        except BaseException as error:  # the loop raises it
            with self._changed:
                self._failure = error
                self._end_sampling()

    def _begin(self) -> bool:
        """Wait until the next step may be sampled. False when there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._may_sample)
            self._idle.stop()
            if self._has_ended:
                return False
            self._before[self._next] = SamplingState.now(self.collector)
            self._sampling = True
            return True

    @property
    def _has_ended(self) -> bool:
        return self._closed or (self._next > self.last_step and not self._ready)

    @property
    def _may_sample(self) -> bool:
        if self._held or self._loaded is None or self._next > self.last_step:
            return False
        if self._waited_for and self._loaded != self._newest:
            return False  # the loop loads it now
        return self._next - 1 - self._loaded <= self.max_staleness

    def _sample(self) -> None:
        step, begun = self._next, time.monotonic()
        try:
            collected = self.collector.collect(step)
        except (SamplingAbandoned, WeightsInTraining) as error:
            # No failure of the run: the prompts are put back, and the same step is sampled again.
            with self._changed:
                if isinstance(error, WeightsInTraining):
                    # Restarted engines have no weights until the loop loads some, which this thread must not do.
                    self._loaded = None
                self._sample_again(step)
                self._end_sampling()
            return
        collected.metrics["rollout/collect_s"] = time.monotonic() - begun
        collected.metrics["rollout/num_engines"] = float(self.rollouts.num_engines)
        with self._changed:
            self._ready.append((step, collected))
            self._next = step + 1
            self._end_sampling()

    def _end_sampling(self) -> None:
        self._sampling = False
        self._idle.start()
        self._changed.notify_all()

    def _sample_again(self, step: int) -> None:
        """Discard what was sampled of `step` and of all later steps, so that they are sampled again."""
        self.collector.load_state_dict(self._before[step].prompts)
        self._ready = deque(batch for batch in self._ready if batch[0] < step)
        self._before = {other: state for other, state in self._before.items() if other < step}
        self._next = step
