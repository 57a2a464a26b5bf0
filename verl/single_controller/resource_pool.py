"""The machines of a run: which node and which GPUs each rank gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass
class ResourcePool:
    """`nnodes` x `workers_per_node` ranks. On GPU one rank is one GPU; on CPU ranks are processes that share the cores.

    Roles are colocated: actor, anchor and rollout engine take turns on the same devices, so a role asks Ray for a
    place and not for devices of its own, and is told its GPUs through CUDA_VISIBLE_DEVICES.
    """

    nnodes: int
    workers_per_node: int
    device: str
    groups: PlacementGroup | None = None

    @property
    def world_size(self) -> int:
        return self.nnodes * self.workers_per_node

    def reserve(self, timeout_s: float) -> None:
        """Reserve the GPUs of every node once; on one CPU machine there is nothing to reserve."""
        if self.device == "cpu" and self.nnodes == 1:
            return
        share = {"GPU": float(self.workers_per_node)} if self.device == "cuda" else {"CPU": 1.0}
        strategy = "STRICT_SPREAD" if self.nnodes > 1 else "PACK"
        self.groups = placement_group([share] * self.nnodes, strategy=strategy)
        if not self.groups.wait(timeout_s):
            raise TimeoutError(
                f"the Ray cluster does not offer {self.nnodes} node(s) with {share}: "
                "check `ray status`, trainer.nnodes and trainer.n_gpus_per_node"
            )

    def actor_options(self, rank: int, num_gpus: int = 1, env_vars: dict[str, str] | None = None) -> dict[str, Any]:
        """Ray options of a role at `rank` that sees `num_gpus` GPUs starting at the rank's own."""
        node, local_rank = divmod(rank, self.workers_per_node)
        env = dict(env_vars or {})
        if self.device == "cuda":
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(local_rank + i) for i in range(num_gpus))
        # Without task events: Ray's control service keeps those of the last 100,000 calls, 4 KB each.
        options: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False, "runtime_env": {"env_vars": env}}
        if self.groups is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self.groups, placement_group_bundle_index=node
            )
        return options

    def release(self) -> None:
        if self.groups is not None:
            remove_placement_group(self.groups)
            self.groups = None
