"""Nodes that only sample: a run continues without one that is lost, and uses one that joins."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import ray

from verl.errors import VerlError, WorkerError
from verl.single_controller.nodes import check_working_dir
from verl.single_controller.resource_pool import JOINING_S, ResourcePool

log = logging.getLogger(__name__)

LOOK_S = 0.5


@dataclass
class SamplingNodes:
    """Nodes with `workers_per_node` devices each, except those in `taken` (addresses); a pool for each node."""

    workers_per_node: int
    device: str
    taken: Collection[str]
    pools: list[ResourcePool] = field(default_factory=list)
    _refused: dict[str, str] = field(default_factory=dict)  # addresses, and why

    def reserve(self, nnodes: int, timeout_s: float) -> None:
        """Reserve `nnodes` nodes. Raises WorkerError if the cluster does not get that many."""
        deadline = time.monotonic() + min(JOINING_S, timeout_s)
        while len(self.pools) < nnodes:
            self.join(nnodes)
            if len(self.pools) < nnodes and time.monotonic() > deadline:
                kind, amount = self._pool("").needed
                refused = "".join(f"; {address}: {why}" for address, why in self._refused.items())
                raise WorkerError(
                    f"the Ray cluster offers {len(self.pools)} of {nnodes} nodes (actor_rollout_ref.rollout.nnodes) "
                    f"with {amount:g} {kind} each besides those that train ({', '.join(self.taken)}); see `ray status`"
                    f"{refused}"
                )
            time.sleep(LOOK_S * (len(self.pools) < nnodes))

    def join(self, most: int) -> list[ResourcePool]:
        """Reserve nodes that have joined the cluster, until there are `most`. One that cannot be reserved is not tried
        again until it has left the cluster and come back.
        """
        new: list[ResourcePool] = []
        for address in self._candidates() if len(self.pools) < most else []:
            pool = self._pool(address)
            try:
                pool.reserve(JOINING_S)
                check_working_dir(pool, JOINING_S)
            except VerlError as error:
                pool.release()
                self._refuse(address, str(error))
                continue
            self.pools.append(pool)
            new.append(pool)
            if len(self.pools) == most:
                break
        return new

    def leave_out(self, address: str) -> None:
        """Do not let a node join, because it is used for something else; one in the pools stays."""
        self.taken = [*self.taken, address]

    def give_up(self, address: str, unusable: str = "") -> None:
        """Release the pool of a node that is lost, or that is `unusable` for the given reason; ignores other nodes."""
        for pool in [pool for pool in self.pools if pool.address == address]:
            self.pools.remove(pool)
            pool.release()
        if unusable:
            self._refuse(address, unusable)

    def release(self) -> None:
        for pool in list(self.pools):
            self.give_up(pool.address)

    def _refuse(self, address: str, why: str) -> None:
        log.warning("node %s does not sample: %s", address, why)
        self._refused[address] = why

    def _candidates(self) -> list[str]:
        kind, amount = self._pool("").needed
        alive = {node["NodeManagerAddress"]: node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]}
        self._refused = {address: why for address, why in self._refused.items() if address in alive}
        known = {pool.address for pool in self.pools}.union(self.taken, self._refused)
        return sorted(address for address, has in alive.items() if has >= amount and address not in known)

    def _pool(self, address: str) -> ResourcePool:
        return ResourcePool(1, self.workers_per_node, self.device, only_on=address)


def is_alive(address: str) -> bool:
    """Whether the cluster has a live node at `address`."""
    return any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())
