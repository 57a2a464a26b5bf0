"""What work costs on a machine: by a share of its data sheet, or as `verl.planning.plan.calibrate` has measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from text_file import read_text
from verl.errors import ConfigError
from verl.planning.dry_run.passes import Operation, Work
from verl.planning.dry_run.place import BETWEEN_NODES, Gpu, Groups
from verl.process.storage import whole_file

COMPUTING, IN_NODE, NETWORK, HOST = "arithmetic and memory", "links in a node", "network", "copies to the host"
HOST_LINK = 63e9  # bytes a second between a GPU and pinned host memory: PCIe 5 x16, in one direction
OBJECT_BYTES = 2e9  # a second from one node to another, where it was not measured
ROUNDS: Mapping[str, float] = {"all-reduce": 2.0}  # of the whole tensor round a ring; 1 for other collectives


@dataclass(frozen=True)
class Kept:
    """The shares of promised arithmetic, memory and links that are reached; `launch_s` seconds before each kernel."""

    products: float
    memory: float
    link: float
    network: float
    launch_s: float


# What is usually reported of large products, copies and NCCL's bus bandwidth.
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
    """The seconds that pass, and those of each thing that is waited for: some of them pass side by side."""

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


@dataclass(frozen=True)
class Machine:
    """The rates that one device reaches, a second; `link_bytes` and `network_bytes` are those that it sends in a ring.

    An operation takes `launch_s` at the least, a collective `call_s` besides its bytes, which go round a ring `rounds`
    times; `object_bytes` are those that Ray's object store sends in a second to another node. With `overlap` the device
    computes while it sends, and starts operations while it computes: a GPU. A core of a CPU does one after the other.
    `source` says where the numbers are from.
    """

    name: str
    half_flops: float  # products in bfloat16 and float16
    float_flops: float  # all others, in TF32 where the device has it
    memory_bytes: float
    link_bytes: float
    network_bytes: float
    launch_s: float
    source: str
    call_s: float = 0.0
    overlap: bool = True
    object_bytes: float = OBJECT_BYTES
    rounds: Mapping[str, float] = field(default_factory=lambda: dict(ROUNDS))

    def flops(self, dtype: torch.dtype) -> float:
        """FLOPs per second."""
        return self.half_flops if dtype in (torch.bfloat16, torch.float16) else self.float_flops

    def cost(self, work: Work, groups: Groups, share: float = 1.0) -> Cost:
        """The cost of one rank's work if its operations have `share` of the counted tokens.

        An operation takes the longer of its arithmetic and its memory traffic.
        """
        # Layers that are alike share their operations: one object, thousands of times.
        different = {id(operation): operation for operation in work.operations}
        seconds = {one: self._seconds(operation, share) for one, operation in different.items()}
        computing = sum(seconds[id(operation)] for operation in work.operations)
        parts = {COMPUTING: computing} | self.sending(work, groups)
        return Cost(max(parts.values()) if self.overlap else sum(parts.values()), parts)

    def _seconds(self, operation: Operation, share: float) -> float:
        arithmetic, moved = operation.flops / self.flops(operation.dtype), operation.num_bytes / self.memory_bytes
        busy = max(arithmetic, moved) * share
        return max(busy, self.launch_s) if self.overlap else busy + self.launch_s

    def sending(self, work: Work, groups: Groups) -> dict[str, float]:
        """Seconds of the collectives, by link; none in a group of one."""
        seconds = {IN_NODE: 0.0, NETWORK: 0.0}
        for kind, num_bytes in work.sent.items():
            size, on_one_node = groups.of(kind)
            if size > 1:
                sent = self.rounds.get(kind, 1.0) * (size - 1) / size * num_bytes
                way = IN_NODE if on_one_node else NETWORK
                seconds[way] += sent / self.link(on_one_node) + work.calls[kind] * self.call_s
        return seconds

    def link(self, on_one_node: bool) -> float:
        """Bytes per second that each device sends in a ring."""
        return self.link_bytes if on_one_node else min(self.link_bytes, self.network_bytes)


def machine_of(gpu: Gpu, kept: Kept | None = None) -> Machine:
    """The machine by a GPU's data sheet, with the fractions that its kind reaches, or `kept`."""
    kept = kept or KEPT[gpu.name]
    source = (
        f"assumed shares, not measured by this project: {kept.products:.0%} of the arithmetic, "
        f"{kept.memory:.0%} of the memory and {kept.link:.0%} of the link rates in the {gpu.name}'s data "
        f"sheet, and {kept.network:.0%} of 400 Gbit/s per GPU between nodes"
    )
    return Machine(
        gpu.name,
        half_flops=gpu.bf16_flops * kept.products,
        float_flops=gpu.tf32_flops * kept.products,
        memory_bytes=gpu.memory_bytes * kept.memory,
        link_bytes=gpu.link_bytes * kept.link,
        network_bytes=BETWEEN_NODES * kept.network,
        launch_s=kept.launch_s,
        source=source,
    )


def write_machine(machine: Machine, path: Path) -> None:
    """Write `machine` as JSON. Raises StorageError."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(machine), indent=2) + "\n")


def read_machine(path: Path) -> Machine:
    """Read what `write_machine` wrote. Raises ConfigError."""
    try:
        values = json.loads(read_text(path, ValueError))
        machine = Machine(**values)
    except (ValueError, TypeError) as error:
        names = ", ".join(one.name for one in fields(Machine))
        raise ConfigError(
            f"--machine {path} cannot be read ({error}): it must be a file of `python -m "
            f"verl.planning.plan.calibrate`, with {names}"
        ) from error
    # The dataclass accepts any value, but seconds are computed by dividing by these.
    rates = ("half_flops", "float_flops", "memory_bytes", "link_bytes", "network_bytes", "object_bytes")
    found = {name: getattr(machine, name) for name in rates}
    if wrong := [name for name, rate in found.items() if not (isinstance(rate, int | float) and rate > 0)]:
        raise ConfigError(f"--machine {path}: {', '.join(wrong)} must be numbers above 0")
    return machine
