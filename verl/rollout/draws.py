"""Which trajectories one call has to sample, with which seeds, in which order, and which of them failed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

from verl.agent.sampling import How
from verl.config import Config
from verl.errors import RolloutError
from verl.protocol import Prompt, Status, Trajectory
from verl.rollout.worker import EpisodeRequest


class Draws:
    """The trajectories of one `collect`: slot s is sample s % n of prompt s // n.

    Slots wait in one queue, in order. One that failed goes to its end, to be drawn again with another seed, at most
    `agent.max_redraws` times.
    """

    def __init__(
        self, config: Config, prompts: Sequence[Prompt], n: int, step: int, how: How, first_group: int
    ) -> None:
        self.config, self.prompts, self.n, self.step, self.how = config, prompts, n, step, how
        self.first_group = first_group
        self.results: list[Trajectory | None] = [None] * (len(prompts) * n)
        self.waiting = deque(range(len(self.results)))
        self.attempts = [0] * len(self.results)
        self.num_unfinished = len(self.results)
        self.num_attempts = self.num_failures = 0
        self.first_failure: str | None = None

    def take(self, most: int) -> list[EpisodeRequest]:
        """The next episodes of the queue."""
        return [self.request(self.waiting.popleft()) for _ in range(min(most, len(self.waiting)))]

    def request(self, slot: int) -> EpisodeRequest:
        prompt = slot // self.n
        group_id = f"{self.how}-{self.step}-{self.first_group + prompt}"
        return EpisodeRequest(slot, self.prompts[prompt], group_id, self._seed(slot))

    def record(self, slot: int, trajectory: Trajectory) -> None:
        """Raises RolloutError once so much has failed that the share is out of bounds whatever comes."""
        self.num_attempts += 1
        failed = trajectory.status is Status.FAILED
        if failed:
            self.num_failures += 1
            self.first_failure = self.first_failure or trajectory.failure
        if failed and self.attempts[slot] < self.config.agent.max_redraws:
            self.attempts[slot] += 1
            self.waiting.append(slot)
        else:
            self.results[slot] = trajectory
            self.num_unfinished -= 1
        self._raise_if_too_many_failed()

    def return_first(self, slots: Iterable[int]) -> None:
        """What was being sampled there is lost: it is the next to be sampled, with the seeds that it had."""
        self.waiting.extendleft(sorted(slots, reverse=True))

    def put_back(self) -> None:
        """All that was being sampled is lost: it waits again, with the seeds that it had."""
        self.waiting = deque(slot for slot, result in enumerate(self.results) if result is None)

    def stats(self) -> dict[str, float]:
        return {
            "env/failed_ratio": self.num_failures / max(1, self.num_attempts),
            "env/redraws": float(self.num_attempts - len(self.results)),
        }

    def trajectories(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.results if trajectory is not None]

    def _raise_if_too_many_failed(self) -> None:
        """Even if everything unfinished succeeds at its next attempt, the share of failures must be in bounds.

        A further failure and its redraw never bring the share back, so when this is said does not depend on the order.
        """
        limit = self.config.agent.max_failed_ratio
        if self.num_failures > limit * (self.num_attempts + self.num_unfinished):
            raise RolloutError(
                f"step {self.step}: {self.num_failures} of {self.num_attempts} episodes failed, more than "
                f"agent.max_failed_ratio={limit:g} allows for {len(self.results)} trajectories. "
                f"The first failure: {self.first_failure}"
            )

    def _seed(self, slot: int) -> int | None:
        """In [0, 2^63): a function of the run's seed and of what is drawn, not of which engine draws it or when."""
        if not self.config.actor_rollout_ref.rollout.seed_per_request:
            return None
        group = self.first_group + slot // self.n
        name = f"{self.config.trainer.seed}/{self.how}/{self.step}/{group}/{slot % self.n}/{self.attempts[slot]}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
