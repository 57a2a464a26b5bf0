"""The trajectories of one prompt in a step, as far as they have been sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.agent.environment import SamplingMode
from verl.config import Config
from verl.protocol import Prompt, Trajectory


@dataclass(eq=False)
class Group:
    """A group of trajectories: one of `prompt` for each of `modes`; `results` are those that have ended.

    `begun` are those that were interrupted. They are resumed when the group is sampled again, maybe in a later step
    under newer weights; `step` is the one in which the group was begun.
    """

    prompt: Prompt
    modes: Sequence[SamplingMode]
    step: int
    number: int  # within its step
    results: dict[int, Trajectory] = field(default_factory=dict)
    begun: dict[int, Trajectory] = field(default_factory=dict)
    begun_at: dict[int, str] = field(default_factory=dict)  # the name of the engine
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.modes[0]}-{self.step}-{self.number}"

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.modes)

    def missing(self) -> list[int]:
        return [index for index in range(len(self.modes)) if index not in self.results]

    def trajectories(self, mode: SamplingMode) -> list[Trajectory]:
        """The group's trajectories that have ended, in order."""
        return [self.results[index] for index in sorted(self.results) if self.modes[index] == mode]

    def oldest_version(self) -> int | None:
        """Oldest version of the weights that sampled any of it; None if nothing was sampled."""
        sampled = [*self.results.values(), *self.begun.values()]
        return min((version for one in sampled for version, _ in one.weight_versions), default=None)

    def seed(self, config: Config, index: int) -> int | None:
        """A seed in [0, 2^63), by the run's seed and by what is sampled, not by which engine samples it or when; None
        without `rollout.seed_per_request`.
        """
        if not config.actor_rollout_ref.rollout.seed_per_request:
            return None
        mode = self.modes[index]
        place = self.modes[:index].count(mode)
        name = f"{config.trainer.seed}/{mode}/{self.step}/{self.number}/{place}/{self.attempts.get(index, 0)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def groups_of(prompts: Sequence[Prompt], modes: Sequence[SamplingMode], step: int, first: int = 0) -> list[Group]:
    """A group for each prompt, numbered from `first`."""
    return [Group(prompt, modes, step, first + number) for number, prompt in enumerate(prompts)]
