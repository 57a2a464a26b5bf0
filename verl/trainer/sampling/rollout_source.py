"""Where the loop gets a step's rollouts from, and who may use the engines when.

The loop trains version n - 1 of the weights on the batch of step n, which makes version n of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from verl.phases import Phase
from verl.process.determinism import random_state, set_random_state
from verl.rollout.manager import RolloutManager
from verl.tracking.spans import Timer
from verl.trainer.sampling.collection import Collected, Collector
from verl.workers.roles import ActorGroup


class RolloutSource(Protocol):
    """The source of a step's rollouts, as the loop calls it, in the order of the steps."""

    def load(self, version: int) -> None:
        """Load the actor's weights, which are `version`, into the engines."""

    def take(self, step: int, timed: Timer) -> Collected:
        """Return the batch of a step; `gen` times how long the loop has waited for it. Raises what sampling and rewards
        raise.
        """

    def renew(self, version: int, timed: Timer, hold: bool = False) -> None:
        """Report new weights of the actor. With `hold`, the loop calls `engines` next."""

    def engines(self, timed: Timer) -> AbstractContextManager[None]:
        """Context in which the engines have the actor's weights and only the loop uses them, for a validation."""

    def discard(self, version: int, timed: Timer) -> None:
        """The actor's weights were replaced: discard everything sampled before, and sample its prompts again."""

    def state(self) -> SamplingState:
        """The state from which a resumed run samples the step after the last one taken."""

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


# The state that decides which prompts are drawn next and how they are scored.


class Prompts(Protocol):
    """Something that prompts are drawn from, whose position can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class SamplingState:
    """The position in `prompts`, and the generators that rewards and environments share, each [n] uint8."""

    prompts: dict[str, Any]
    random: dict[str, torch.Tensor]

    @classmethod
    def now(cls, prompts: Prompts) -> SamplingState:
        return cls(prompts.state_dict(), random_state())

    def to_json(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "random": {name: state.numpy().tobytes().hex() for name, state in self.random.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SamplingState:
        drawn = {name: bytearray.fromhex(state) for name, state in saved.get("random", {}).items()}
        return cls(
            saved["prompts"], {name: torch.frombuffer(state, dtype=torch.uint8) for name, state in drawn.items()}
        )

    def put_back(self, prompts: Prompts) -> None:
        """Restore the state. Raises DataError if `prompts` are not those of the state."""
        prompts.load_state_dict(self.prompts)
        set_random_state(self.random)
