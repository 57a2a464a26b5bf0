"""The devices that a run is estimated for: those that `--gpus` describes, or those of this machine."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from verl.config import Config
from verl.config.rules.placement import (
    ROLLOUT,
    RoleName,
    devices_of_nodes,
    fits_on_nodes,
    num_ranks,
    placement_problems,
)
from verl.errors import ConfigError
from verl.process.startup import usable_memory


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, with the rates of its data sheet (dense arithmetic).

    `size`: nominal, in GB; `memory`: as the driver reports it, in GiB; the rest is per second."""

    name: str
    size: int
    memory: float
    bf16_flops: float
    tf32_flops: float
    memory_bytes: float
    link_bytes: float  # in one direction, to the other GPUs of the node


GPUS = (
    Gpu("A100-40", 40, 39.4, 312e12, 156e12, 1.555e12, 300e9),
    Gpu("L40S", 48, 44.4, 362e12, 183e12, 0.864e12, 32e9),
    Gpu("A100", 80, 79.1, 312e12, 156e12, 2.039e12, 300e9),
    Gpu("H100", 80, 79.1, 989e12, 494e12, 3.35e12, 450e9),
    Gpu("H200", 141, 139.8, 989e12, 494e12, 4.8e12, 450e9),
    Gpu("B200", 180, 178.3, 2250e12, 1125e12, 7.7e12, 900e9),
)


USABLE = 0.98  # of a size that no GPU here has: GiB that the driver leaves of a gigabyte on the box
USUAL = tuple(gpu for gpu in GPUS if gpu.name in ("A100", "H100"))  # where a size says no name
GIB = 2**30
BETWEEN_NODES = 50e9  # bytes a second of one GPU: a network card of 400 Gbit/s for each
NODE = 8  # GPUs
GPUS_HELP = "devices to plan for, such as 8x80, 8xH100 or 4x8xH100 (default: this machine's)"


@dataclass(frozen=True)
class Place:
    """The devices of a run: `num_devices` with `memory` bytes each; `gpus`: possible models, none for CPUs, which share
    a machine's memory.

    per_node: devices of a node, if given.
    """

    num_devices: int
    memory: int
    gpus: tuple[Gpu, ...] = ()
    per_node: int | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def kind(self) -> str:
        """The kind of device whose code paths the engines take."""
        return "cuda" if self.on_gpu else "cpu"


def parse_gpus(text: str) -> Place:
    """The devices that a text describes: `8xH100`, `8x80` for eight GPUs of 80 GB, or `4x8xH100` for four nodes of
    eight; `4xCPU` for four workers that share a machine like this one. Raises ConfigError.
    """
    *numbers, what = text.split("x")
    on_cpu = what.upper() == "CPU"
    found = tuple(gpu for gpu in GPUS if what.upper() == gpu.name or what == str(gpu.size))
    counted = len(numbers) in (1, 2) and all(number.isdigit() and int(number) for number in numbers)
    if not counted or not (found or on_cpu or (what.isdigit() and int(what))):
        names = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(
            f"--gpus {text} is not understood: give a number and a size (8x80) or a number and a name (8xH100; "
            f"known: {names}, CPU); for several nodes also their number (4x8xH100)"
        )
    # Of two numbers the first is that of the nodes. A known kind of GPU has its exact memory, any other a share of
    # the size in its name.
    per_node = int(numbers[1]) if len(numbers) == 2 else None
    if on_cpu:
        return Place(math.prod(map(int, numbers)), usable_memory() // int(numbers[-1]), (), per_node)
    memory = found[0].memory if found else USABLE * int(what)
    return Place(math.prod(map(int, numbers)), int(memory * GIB), found or USUAL, per_node)


def here(config: Config) -> Place:
    """This machine, with as many devices as the run asks for."""
    import torch  # takes seconds, which --help need not wait for

    trainer = config.trainer
    num_devices = sum(devices_of_nodes(config))
    if torch.cuda.is_available() and trainer.device != "cpu":
        found = torch.cuda.get_device_properties(0)
        # Of a kind that has several sizes, such as the A100, it is the one whose memory comes nearest.
        named = [gpu for gpu in GPUS if gpu.name.split("-")[0] in found.name]
        named.sort(key=lambda gpu: abs(gpu.memory * GIB - found.total_memory))
        return Place(num_devices + config.reward.n_gpus, found.total_memory, tuple(named[:1]) or USUAL)
    return Place(num_devices, usable_memory() // trainer.n_gpus_per_node)


def located(config: Config, place: Place) -> Config:
    """The config of the run on the devices of `place`. Raises ConfigError when it cannot be divided among them.

    GPUs per node are as given, else as in the settings if that divides all GPUs, else 8; fewer GPUs are one node. The
    GPUs of the reward's server are not among them: as in a run they are on one node, where a role's node has some
    left, or on a node of their own.
    """
    server = config.reward.n_gpus if place.on_gpu else 0
    sizes = _sizes(config, place, server)
    # Divisions that use most devices come first, and of these the one with the fewest training nodes.
    possible = [moved for nodes, each in sizes if (moved := _divided(config, place, nodes, each))]
    possible.sort(key=lambda moved: (-sum(devices_of_nodes(moved)), moved.trainer.nnodes))
    if not possible:
        nodes, each = sizes[0]
        apart, judge = config.actor_rollout_ref.rollout, f", and {server} GPUs of a node are the reward server's"
        raise ConfigError(
            f"of {nodes} nodes of {each} GPUs, {apart.nnodes} only sample ({ROLLOUT}.nnodes), with "
            f"{apart.n_gpus_per_node or each} GPUs each{judge * bool(server)}: none is left to train"
        )
    for moved in possible:
        if not list(placement_problems(moved)):
            return moved
    raise ConfigError("\n".join(placement_problems(possible[0])))


def _sizes(config: Config, place: Place, server: int) -> list[tuple[int, int]]:
    """The numbers of nodes, and of GPUs of each, that may be for the roles; first all there are. Raises ConfigError."""
    num_devices, wanted = place.num_devices - server, config.trainer.n_gpus_per_node
    settings = devices_of_nodes(config)
    # The settings already use all devices: the run stays as it is.
    if place.per_node is None and num_devices == sum(settings):
        return [(len(settings), wanted)]
    of_a_node = place.per_node or min(place.num_devices, max(NODE, wanted))
    if server > of_a_node:
        raise ConfigError(
            f"reward.n_gpus={server}: the reward's server has GPUs of one node, and a node has {of_a_node}: lower it, "
            "or say how many a node has, as in --gpus 2x16x80"
        )
    if num_devices < 1:
        raise ConfigError(
            f"reward.n_gpus={server} GPUs of a node are the reward server's alone, of {place.num_devices}: "
            "none is left for the roles; lower it, or take more GPUs"
        )
    if place.per_node is None:
        each = _per_node(num_devices, wanted)
        return [(num_devices // each, each)]
    # The server takes its GPUs from one node. As all nodes of the roles are alike, either each of them has so many
    # fewer, or that node is left out.
    nodes, each = place.num_devices // place.per_node, place.per_node
    beside_the_server = [(nodes, each - server), (nodes - 1, each)] if server else []
    return [(nodes, each), *(size for size in beside_the_server if all(size))]


def _divided(config: Config, place: Place, nodes: int, each: int) -> Config | None:
    """The config of the run on so many nodes, those that only sample among them; None where none is left to train, or
    where the nodes of `place` have too few GPUs for that.
    """
    moved = copy.deepcopy(config)
    trainer = moved.trainer
    trainer.device = "cuda" if place.on_gpu else "cpu"
    trainer.n_gpus_per_node, trainer.nnodes = each, nodes - moved.actor_rollout_ref.rollout.nnodes
    if trainer.nnodes < 1:
        return None
    if place.on_gpu and place.per_node:
        there = [place.per_node] * (place.num_devices // place.per_node)
        return moved if fits_on_nodes(moved, there, config.reward.n_gpus) else None
    return moved


def _per_node(num_devices: int, wanted: int) -> int:
    for each in (wanted, NODE, num_devices):
        if num_devices % each == 0 and (each <= NODE or each == wanted):
            return each
    raise ConfigError(f"{num_devices} GPUs do not fill whole nodes of {NODE}: give the number per node, as in 3x4x80")


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that communicate: `shard` ranks share a copy of a model, there are `replicas` copies,
    `per_node` ranks are on a node, and `sequence` ranks share each row.
    """

    shard: int
    replicas: int = 1
    per_node: int = NODE
    sequence: int = 1

    def of(self, collective: str) -> tuple[int, bool]:
        """The number of ranks in a collective of that kind, and whether they are all on one node."""
        if collective == "all-reduce" and self.replicas > 1:  # of gradients, between ranks that hold the same shard
            return self.replicas, self.shard * self.replicas <= self.per_node
        size = self.sequence if collective == "all-to-all" and self.sequence > 1 else self.shard
        return size, size <= self.per_node


def rank_groups(config: Config, fsdp_size: int, role: RoleName = "actor") -> Groups:
    """The groups of a role with that `fsdp_size`."""
    ranks = num_ranks(config, role)
    shard = ranks if fsdp_size == -1 else fsdp_size
    settings = config.actor_rollout_ref.actor if role == "actor" else config.critic
    return Groups(shard, ranks // shard, ranks // config.trainer.nnodes, settings.ulysses_sequence_parallel_size)
