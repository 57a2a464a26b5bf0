"""Which trajectories one call has to sample, with which seeds, and which of them failed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from verl.agent.sampling import How
from verl.config import Config
from verl.errors import RolloutError
from verl.protocol import Prompt, Status, Trajectory
from verl.rollout.worker import EpisodeRequest


class Draws:
    """The trajectories of one `collect`: slot s is sample s % n of prompt s // n."""

    def __init__(
        self, config: Config, prompts: Sequence[Prompt], n: int, step: int, how: How, first_group: int
    ) -> None:
        self.config, self.prompts, self.n, self.step, self.how = config, prompts, n, step, how
        self.first_group = first_group
        self.results: list[Trajectory | None] = [None] * (len(prompts) * n)
        self.num_attempts = self.num_failures = 0
        self.first_failure: str | None = None

    def prompt_of(self, slot: int) -> int:
        return slot // self.n

    def request(self, slot: int, attempt: int) -> EpisodeRequest:
        prompt = self.prompt_of(slot)
        group_id = f"{self.how}-{self.step}-{self.first_group + prompt}"
        return EpisodeRequest(self.prompts[prompt], group_id, self._seed(slot, attempt))

    def record(self, slots: Sequence[int], results: Sequence[Trajectory]) -> None:
        for slot, trajectory in zip(slots, results, strict=True):
            self.results[slot] = trajectory
            self.num_attempts += 1
            if trajectory.status is Status.FAILED:
                self.num_failures += 1
                self.first_failure = self.first_failure or trajectory.failure

    def failed(self) -> list[int]:
        return [s for s, result in enumerate(self.results) if result is not None and result.status is Status.FAILED]

    def raise_if_too_many_failed(self, num_redraws: int) -> None:
        """Even if the next `num_redraws` attempts all succeed, the share of failures must be in bounds."""
        limit = self.config.agent.max_failed_ratio
        if self.num_failures > limit * (self.num_attempts + num_redraws):
            raise RolloutError(
                f"step {self.step}: {self.num_failures} of {self.num_attempts} episodes failed, more than "
                f"agent.max_failed_ratio={limit:g}. The first failure: {self.first_failure}"
            )

    def stats(self) -> dict[str, float]:
        return {
            "env/failed_ratio": self.num_failures / max(1, self.num_attempts),
            "env/redraws": float(self.num_attempts - len(self.results)),
        }

    def trajectories(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.results if trajectory is not None]

    def _seed(self, slot: int, attempt: int) -> int | None:
        """In [0, 2^63): a function of the run's seed and of what is drawn, not of how many engines there are."""
        if not self.config.actor_rollout_ref.rollout.seed_per_request:
            return None
        group = self.first_group + self.prompt_of(slot)
        name = f"{self.config.trainer.seed}/{self.how}/{self.step}/{group}/{slot % self.n}/{attempt}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
