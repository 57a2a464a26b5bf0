"""One role as a group of Ray actors, one per rank."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from verl.single_controller.resource_pool import ResourcePool
from verl.single_controller.waiting import Call, put, wait_for, wait_for_start


class WorkerGroup:
    """Starts `worker_class(*args, rank, world_size)` on every rank of a pool and calls methods on all of them.

    Arguments for several workers are put into the object store once, and each reads them from there.
    """

    def __init__(
        self, worker_class: type, pool: ResourcePool, *args: Any, timeout_s: float, env_vars: dict[str, str]
    ) -> None:
        self.name = worker_class.__name__
        self.timeout_s = timeout_s
        remote_class = ray.remote(worker_class)
        self.workers = [
            remote_class.options(**pool.actor_options(rank, env_vars=env_vars)).remote(*args, rank, pool.world_size)
            for rank in range(pool.world_size)
        ]

    def wait_for_start(self) -> None:
        """Wait until every rank's process runs; see `waiting.wait_for_start`."""
        wait_for_start(self.workers, self.name, self.timeout_s)

    def call_all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """The method's results on all ranks, in rank order, within `timeout_s` or the group's own deadline."""
        return self.begin_all(method, *args, timeout_s=timeout_s)()

    def begin_all(self, method: str, *args: Any, timeout_s: float | None = None) -> Call:
        """Like `call_all`, but returns a `Call` to wait for; a rank runs its calls one after the other."""
        shared = args if len(self.workers) == 1 else [put(arg, f"{self.name}.{method}") for arg in args]
        references = [getattr(worker, method).remote(*shared) for worker in self.workers]
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return Call(references, f"{self.name}.{method}", limit_s)

    def call_first(self, method: str, *args: Any) -> Any:
        """The method's result on rank 0 alone."""
        return wait_for([getattr(self.workers[0], method).remote(*args)], f"{self.name}.{method}", self.timeout_s)[0]

    def shutdown(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(Exception):  # a worker that is already gone needs no killing
                ray.kill(worker)
