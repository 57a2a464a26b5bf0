"""How much of its data sheet's promise a machine keeps, and what work costs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from verl.trainer.dry_run.gpus import BETWEEN_NODES, Gpu, Groups
from verl.trainer.dry_run.work import Work

COMPUTING, IN_NODE, NETWORK, HOST = "arithmetic and memory", "links in a node", "network", "copies to the host"
HOST_LINK = 63e9  # bytes a second between a GPU and pinned host memory: PCIe 5 x16, in one direction


@dataclass(frozen=True)
class Kept:
    """Shares of the promised arithmetic, memory and links that are reached; `launch_s` seconds before each kernel."""

    products: float
    memory: float
    link: float
    network: float
    launch_s: float


# Not measured by this project: what is usually reported of large products, copies and NCCL's bus bandwidth.
KEPT: Mapping[str, Kept] = {
    "A100-40": Kept(0.65, 0.8, 0.75, 0.8, 4e-6),
    "L40S": Kept(0.6, 0.8, 0.6, 0.8, 4e-6),
    "A100": Kept(0.65, 0.8, 0.75, 0.8, 4e-6),
    "H100": Kept(0.55, 0.8, 0.75, 0.8, 4e-6),
    "H200": Kept(0.55, 0.8, 0.75, 0.8, 4e-6),
    "B200": Kept(0.5, 0.8, 0.75, 0.8, 4e-6),
}


@dataclass(frozen=True)
class Cost:
    """Seconds that pass, and those of each thing that is waited for: some of them pass side by side."""

    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name], default="nothing")

    def __add__(self, other: Cost) -> Cost:
        names = {**self.parts, **other.parts}
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return Cost(self.seconds + other.seconds, parts)

    def times(self, factor: float) -> Cost:
        return Cost(self.seconds * factor, {name: seconds * factor for name, seconds in self.parts.items()})


def side_by_side(parts: Mapping[str, float]) -> Cost:
    """The longest is what passes."""
    return Cost(max(parts.values(), default=0.0), parts)


@dataclass(frozen=True)
class Machine:
    """Nodes of a kind of GPU."""

    gpu: Gpu
    kept: Kept

    @property
    def memory_bytes(self) -> float:
        """A second."""
        return self.gpu.memory_bytes * self.kept.memory

    def flops(self, dtype: torch.dtype) -> float:
        """A second."""
        half = dtype in (torch.bfloat16, torch.float16)
        return (self.gpu.bf16_flops if half else self.gpu.tf32_flops) * self.kept.products

    def cost(self, work: Work, groups: Groups, share: float = 1.0) -> Cost:
        """Of one rank's work when its operations have `share` of the tokens that were counted.

        An operation takes the longest of its arithmetic, its way through memory and its launch; collectives run beside.
        """
        computing = 0.0
        for operation in work.operations:
            arithmetic, moved = operation.flops / self.flops(operation.dtype), operation.num_bytes / self.memory_bytes
            computing += max(max(arithmetic, moved) * share, self.kept.launch_s)
        return side_by_side({COMPUTING: computing} | self.sending(work, groups))

    def sending(self, work: Work, groups: Groups) -> dict[str, float]:
        """Seconds of the collectives by where they go, in rings; an all-reduce goes round twice."""
        seconds = {IN_NODE: 0.0, NETWORK: 0.0}
        for kind, num_bytes in work.sent.items():
            size, on_one_node = groups.of(kind)
            rounds = (2.0 if kind == "all-reduce" else 1.0) * (size - 1) / size
            seconds[IN_NODE if on_one_node else NETWORK] += rounds * num_bytes / self.link(on_one_node)
        return seconds

    def link(self, on_one_node: bool) -> float:
        """Bytes a second that each GPU sends in a ring."""
        in_node = self.gpu.link_bytes * self.kept.link
        return in_node if on_one_node else min(in_node, BETWEEN_NODES * self.kept.network)


def machine_of(gpu: Gpu) -> Machine:
    return Machine(gpu, KEPT[gpu.name])
