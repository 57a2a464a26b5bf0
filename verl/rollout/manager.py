"""The driver's view of all rollout engines: collect trajectories, load weights, sleep and wake."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from verl.config import Config
from verl.errors import ConfigError, RolloutError
from verl.protocol import Prompt, Status, Trajectory
from verl.rollout.weight_file import WeightHandle
from verl.rollout.weight_ipc import ExportedWeights
from verl.rollout.worker import EpisodeRequest, How, RolloutWorker, ranks_per_engine
from verl.single_controller import ResourcePool, wait_for

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0


class RolloutManager:
    """Starts the engines and spreads prompts over them. Every wait ends after `trainer.step_timeout_s`.

    On CPU the engines load in the background: the first call waits for them. On GPU they are waited for here, since
    an engine measures the free memory while it starts. `stats` describes the latest `collect`.
    """

    def __init__(self, config: Config, pool: ResourcePool) -> None:
        self.config = config
        self.timeout_s = config.trainer.step_timeout_s
        self.stats: dict[str, float] = {}
        self._workers = _start_workers(config, pool)
        self._starting = [worker.start.remote() for worker in self._workers]
        if pool.device == "cuda":
            self._wait_until_started()

    def check(self) -> None:
        """Raise `EnvironmentUnavailable` when an engine cannot reach the environment's infrastructure."""
        self._call_all("check")

    def collect(
        self, prompts: Sequence[Prompt], n: int, step: int, how: How = "train", first_group: int = 0
    ) -> list[Trajectory]:
        """`n` trajectories of each prompt, in prompt order; the group of a prompt is sampled by one engine.

        Groups are numbered from `first_group`, so that several calls in one step draw different things.
        A trajectory that failed (infrastructure) is drawn again, with another seed, at most `agent.max_redraws` times;
        what still fails is returned with status `FAILED`. Raises `RolloutError` with the first failure's text when
        more than `agent.max_failed_ratio` of all attempts failed, or are sure to.
        """
        self._wait_until_started()
        draws = _Draws(self.config, prompts, n, step, how, first_group)
        pending = list(range(len(prompts) * n))
        for attempt in range(self.config.agent.max_redraws + 1):
            self._run(draws, pending, attempt)
            pending = draws.failed()
            draws.raise_if_too_many_failed(len(pending) if attempt < self.config.agent.max_redraws else 0)
            if not pending:
                break
            log.warning("step %d: %d trajectories failed, the first: %s", step, len(pending), draws.first_failure)
        self.stats = draws.stats()
        return draws.trajectories()

    def load_weights(self, handle: WeightHandle | ExportedWeights) -> None:
        """Give published weights to every engine. Raises `WeightSyncError` when one read something else.

        Exported weights are released afterwards, whether or not that went well.
        """
        if isinstance(handle, WeightHandle):
            self._call_all("load_weights", handle)
            return
        try:
            self._call_all("load_weights", replace(handle, release=None))
        finally:
            if handle.release is not None:
                handle.release()

    def sleep(self) -> None:
        """Free the GPU memory of the engines while the policy is updated. Does nothing on CPU."""
        self._call_all("sleep")

    def wake(self) -> None:
        self._call_all("wake")

    def shutdown(self) -> None:
        """End all engines, also those that did not start or do not answer."""
        with contextlib.suppress(Exception):  # whatever is wrong with a worker, it is killed next
            ray.wait([w.shutdown.remote() for w in self._workers], num_returns=len(self._workers), timeout=SHUTDOWN_S)
        for worker in self._workers:
            with contextlib.suppress(Exception):
                ray.kill(worker)
        self._workers = []

    def _run(self, draws: _Draws, slots: Sequence[int], attempt: int) -> None:
        shares = [[s for s in slots if draws.prompt_of(s) % len(self._workers) == i] for i in range(len(self._workers))]
        busy = [(worker, share) for worker, share in zip(self._workers, shares, strict=True) if share]
        calls = [
            worker.run.remote([draws.request(slot, attempt) for slot in share], draws.how) for worker, share in busy
        ]
        for (_, share), results in zip(busy, wait_for(calls, "rollout", self.timeout_s), strict=True):
            draws.record(share, results)

    def _call_all(self, method: str, *args: Any) -> None:
        self._wait_until_started()
        wait_for([getattr(w, method).remote(*args) for w in self._workers], f"rollout {method}", self.timeout_s)

    def _wait_until_started(self) -> None:
        if self._starting:
            wait_for(self._starting, "start of the rollout engines", self.timeout_s)
            self._starting = []


class _Draws:
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


def _start_workers(config: Config, pool: ResourcePool) -> list[Any]:
    ranks = ranks_per_engine(config, pool.device)
    num_engines = _num_engines(config, pool, ranks)
    remote_class = ray.remote(RolloutWorker)
    # One thread for the event loop's own process; the engine's process is given its threads by the engine.
    variables = {"OMP_NUM_THREADS": "1"}
    options = [pool.actor_options(i * ranks % pool.world_size, ranks, variables) for i in range(num_engines)]
    return [remote_class.options(**option).remote(config, num_engines, pool.device) for option in options]


def _num_engines(config: Config, pool: ResourcePool, ranks: int) -> int:
    if pool.device == "cpu":
        return config.actor_rollout_ref.rollout.num_engines
    if pool.workers_per_node % ranks:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks} does not divide "
            f"trainer.n_gpus_per_node={pool.workers_per_node}; set it to a divisor, 1 for one engine per GPU"
        )
    return pool.world_size // ranks
