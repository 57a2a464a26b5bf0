"""Where the loop gets a step's rollouts from, and who may use the engines when.

The loop trains version n - 1 of the weights on the batch of step n, which makes version n of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from verl.phases import Phase
from verl.rollout.manager import RolloutManager
from verl.tracking.timing import Timer
from verl.trainer.sampling.collection import Collected, Collector
from verl.trainer.sampling.sampling_state import SamplingState
from verl.workers.roles import ActorGroup


class RolloutSource(Protocol):
    """What the loop calls, in the order of the steps."""

    def load(self, version: int) -> None:
        """Load the actor's weights, which are `version`, into the engines."""

    def take(self, step: int, timed: Timer) -> Collected:
        """The batch of a step; `gen` is how long the loop has waited for it. Raises what sampling and rewards raise."""

    def renew(self, version: int, timed: Timer, hold: bool = False) -> None:
        """Report new weights of the actor. With `hold`, the loop calls `engines` next."""

    def engines(self, timed: Timer) -> AbstractContextManager[None]:
        """Inside, the engines have the actor's weights and only the loop uses them, for a validation."""

    def discard(self, version: int, timed: Timer) -> None:
        """The actor's weights were replaced: discard everything sampled before, and sample its prompts again."""

    def state(self) -> SamplingState:
        """State from which a resumed run samples the step after the last one taken."""

    def close(self) -> None:
        """Stop sampling."""


class InTurn:
    """Samples a step when the loop takes it: sampling and training alternate."""

    def __init__(self, collector: Collector, rollouts: RolloutManager, actor: ActorGroup) -> None:
        self.collector, self.rollouts, self.actor = collector, rollouts, actor

    def load(self, version: int) -> None:
        self.rollouts.load_weights(partial(self.actor.publish_weights, version))

    def take(self, step: int, timed: Timer) -> Collected:
        with timed("gen"):
            collected = self.collector.collect(step)
            collected.metrics["rollout/num_engines"] = float(self.rollouts.num_engines)
            self.actor.note_memory(Phase.SAMPLE)
            self.rollouts.sleep()
        return collected

    def renew(self, version: int, timed: Timer, hold: bool = False) -> None:
        with timed("weight_sync"):
            self.load(version)

    def engines(self, timed: Timer) -> AbstractContextManager[None]:
        return nullcontext()

    def discard(self, version: int, timed: Timer) -> None:
        self.collector.forget()
        self.renew(version, timed)

    def state(self) -> SamplingState:
        return SamplingState.now(self.collector)

    def close(self) -> None:
        pass
