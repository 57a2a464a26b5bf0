"""The machines of a run (which node and which devices each rank gets), and a role as a group of Ray actors, one per
rank.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import ConfigError, WorkerError
from verl.process.ranks import variables_of_driver
from verl.single_controller.waiting import Call, put, wait_for, wait_for_start

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPUS = {VISIBLE: ""}  # variables of an actor that holds none: Ray leaves it those of its node, which are all
A_BIT = 0.001  # of the resource "node:ADDRESS", of which each node has one in Ray: enough to be placed there
JOINING_S = 60.0  # how long to wait for a node that is not in the cluster yet


@dataclass(frozen=True)
class Node:
    """A node of the run: its address, the run's GPUs on it, as CUDA_VISIBLE_DEVICES names them, and their bundle in
    Ray.
    """

    address: str
    devices: tuple[str, ...]
    bundle: int = 0


@dataclass
class ResourcePool:
    """`nnodes` x `workers_per_node` ranks. On GPU one rank is one GPU; on CPU ranks are processes that share the cores.

    Ray owns the GPUs: `reserve` takes a bundle of them on every node and asks Ray which ones they are. Roles that take
    turns on a device must be on the same one, and an engine of several ranks on several, which Ray's fractional GPUs do
    not guarantee (Ray fills one device after another). So a role asks Ray for a place in the bundle, and gets its
    devices through CUDA_VISIBLE_DEVICES.

    The driver's node comes first if it is one of them, so that rank 0 writes where the driver does; the others follow
    by address.
    """

    nnodes: int
    workers_per_node: int
    device: str
    groups: PlacementGroup | None = None
    nodes: tuple[Node, ...] = ()
    first: int = 0  # number of the first device on a node, for a part of the pool
    only_on: str | None = None  # address of the only node that it may use

    @property
    def world_size(self) -> int:
        return self.nnodes * self.workers_per_node

    def reserve(self, timeout_s: float) -> None:
        """Reserve the GPUs of every node, once; on a single CPU machine there is nothing to reserve."""
        if self.device == "cpu" and self.nnodes == 1 and self.only_on is None:
            return

        # A bundle on every node. If the cluster does not have the nodes yet, it may still get them.
        kind, amount = self.needed
        strategy = "STRICT_SPREAD" if self.nnodes > 1 else "PACK"
        pinned = {f"node:{self.only_on}": A_BIT} if self.only_on else {}
        self.groups = placement_group([{kind: amount} | pinned] * self.nnodes, strategy=strategy)
        present = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
        enough = sum(found >= amount for found in present) >= self.nnodes
        if not self.groups.wait(timeout_s if enough else min(JOINING_S, timeout_s)):
            self.release()
            where = f"node {self.only_on}" if self.only_on else f"{self.nnodes} node(s)"
            raise WorkerError(
                f"the Ray cluster does not offer {where} with {amount:g} {kind} each: its nodes have {present} of "
                "them, and other jobs may hold some; check `ray status`, CUDA_VISIBLE_DEVICES, trainer.nnodes and "
                "trainer.n_gpus_per_node"
            )

        # Ray says where the bundles are, and which GPUs are in them, only to a task that runs there.
        gpus = self.workers_per_node if self.device == "cuda" else 0
        asked = [
            ray.remote(_this_node)
            .options(num_cpus=0, num_gpus=gpus, scheduling_strategy=self._bundle(bundle))
            .remote(bundle)
            for bundle in range(self.nnodes)
        ]
        found = wait_for(asked, "asking Ray for the devices", timeout_s)
        own = ray.util.get_node_ip_address()
        self.nodes = tuple(sorted(found, key=lambda node: (node.address != own, _in_order(node.address))))

    @property
    def address(self) -> str:
        """Address of its first node; empty if nothing had to be reserved."""
        return self.nodes[0].address if self.nodes else ""

    @property
    def needed(self) -> tuple[str, float]:
        """The resource that Ray is asked for on a node, and its amount."""
        return ("GPU", float(self.workers_per_node)) if self.device == "cuda" else ("CPU", 1.0)

    def part(self, first: int, count: int) -> ResourcePool:
        """The ranks on `count` devices of each node, from number `first` on. Released with the whole."""
        return replace(self, first=self.first + first, workers_per_node=count)

    def actor_options(self, rank: int, num_gpus: int = 1, env_vars: dict[str, str] | None = None) -> dict[str, Any]:
        """Ray options of a role at `rank` that sees `num_gpus` GPUs starting at the rank's own."""
        node, local_rank = divmod(rank, self.workers_per_node)
        env = dict(env_vars or {})
        if self.device == "cuda":
            own = self.nodes[node].devices[self.first + local_rank :][:num_gpus]
            env |= {VISIBLE: ",".join(own), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return self._quiet_options(node, env)

    def plain_options(self, node: int) -> dict[str, Any]:
        """Ray options of an actor on a node, which sees no GPU."""
        return self._quiet_options(node, NO_GPUS)

    def node_options(self, node: int) -> dict[str, Any]:
        """Ray options of something that runs on a node, in addition to the roles there."""
        options: dict[str, Any] = {"num_cpus": 0}
        if self.groups is not None:
            options["scheduling_strategy"] = self._bundle(self.nodes[node].bundle)
        return options

    def release(self) -> None:
        if self.groups is not None:
            remove_placement_group(self.groups)
            self.groups = None

    def _quiet_options(self, node: int, env: dict[str, str]) -> dict[str, Any]:
        # Without task events: Ray's control service keeps the last 100,000 of them, 4 KB each.
        variables = {"env_vars": variables_of_driver() | env}
        return self.node_options(node) | {"enable_task_events": False, "runtime_env": variables}

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(placement_group=self.groups, placement_group_bundle_index=index)


def device_of_cluster(name: str) -> str:
    """ "cpu" or "cuda" for `trainer.device`. This process needs no GPU; the GPUs of Ray's nodes count.

    Raises ConfigError when GPUs are asked for and Ray has none, or PyTorch is a build without CUDA.
    """
    import torch  # takes seconds and 200 MiB, and the processes that look after a node do not need it

    offered, built = ray.cluster_resources().get("GPU", 0), torch.backends.cuda.is_built()
    if name == "cpu" or (name == "auto" and not (offered and built)):
        return "cpu"
    if not built:
        raise ConfigError("trainer.device=cuda, but this PyTorch is built without CUDA; install requirements/gpu.lock")
    if not offered:
        raise ConfigError(
            "trainer.device=cuda, but Ray offers no GPU on any node: check nvidia-smi, CUDA_VISIBLE_DEVICES and "
            "`ray status`, or set trainer.device=cpu"
        )
    return "cuda"


def _this_node(bundle: int) -> Node:
    """The node of a bundle; runs there, with access to its GPUs, which Ray lists in no particular order."""
    devices = sorted((str(device) for device in ray.get_gpu_ids()), key=_in_order)
    return Node(ray.util.get_node_ip_address(), tuple(devices), bundle)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort key that compares the numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


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
