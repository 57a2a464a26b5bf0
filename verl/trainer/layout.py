"""The layout of a run: its devices, divided among the roles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ray

from verl.config import Config, check_supported
from verl.config.rules.placement import Placement, placement_of
from verl.errors import ConfigError
from verl.single_controller import Node
from verl.single_controller.folder_copies import FolderCopies
from verl.single_controller.nodes import SamplingNodes, check_nodes
from verl.single_controller.worker_group import JOINING_S, ResourcePool
from verl.trainer.reward_server import reserve_reward_server

NODES_SHOWN = 8
LOOK_S = 1.0

log = logging.getLogger(__name__)


class Pools(NamedTuple):
    """The reserved devices of a run. The engines are on `sampling`, or else on `sampling_nodes`; a critic is on
    `critic`, which is `training` if it has no devices of its own; the reward's server is on `reward_server` if it has
    GPUs. `copies`: the run folder on nodes that do not share it. `release` returns the devices to Ray.
    """

    sampling: ResourcePool
    sampling_nodes: SamplingNodes | None
    training: ResourcePool
    critic: ResourcePool
    reward_server: ResourcePool | None
    copies: FolderCopies
    table: str
    release: Callable[[], None]


def reserve_pools(config: Config, device: str) -> Pools:
    """Reserve the devices of a run. Raises ConfigError or WorkerError when they do not exist, or when several nodes do
    not reach each other or do not share the run's folder.
    """
    place, timeout_s = placement_of(config, device), config.trainer.step_timeout_s
    whole = ResourcePool(place.nnodes, place.per_node, device)
    apart: SamplingNodes | None = None
    on_one_cpu_node = place.nnodes == 1 and device == "cpu"
    if on_one_cpu_node and (place.sampling_nodes or sum(node["Alive"] for node in ray.nodes()) > 1):
        whole.only_on = ray.util.get_node_ip_address()  # else its processes would be wherever there is room
    with ExitStack() as reserved:
        # The nodes of the trained roles, which must see the run's folder or get copies of it.
        reserved.callback(whole.release)
        whole.reserve(timeout_s)
        run_dir = Path(config.trainer.default_local_dir)
        without = check_nodes(whole, run_dir, timeout_s, config.trainer.gather_state)
        copies = FolderCopies(whole, without, run_dir, timeout_s)
        reserved.callback(copies.close)

        # Nodes that only sample, and the reward's server, which must not be taken for one of them.
        if place.sampling_nodes:
            apart = SamplingNodes(place.sampling, device, [node.address for node in whole.nodes])
            reserved.callback(apart.release)
            apart.reserve(place.sampling_nodes, timeout_s)
        if reward_server := reserve_reward_server(config, timeout_s):
            reserved.callback(reward_server.release)
            if apart:
                apart.leave_out(reward_server.address)
        release = reserved.pop_all().close

    # Each role's part of the nodes.
    training = whole.part(place.first_training, place.training)
    critic = whole.part(place.per_node - place.critic, place.critic) if place.critic else training
    sampling_nodes = [node for pool in apart.pools for node in pool.nodes] if apart else []
    table = layout_table(place, whole.nodes, sampling_nodes, reward_server.nodes[0] if reward_server else None)
    return Pools(whole.part(0, place.sampling), apart, training, critic, reward_server, copies, table, release)


def layout_table(
    place: Placement, nodes: Sequence[Node], sampling_nodes: Sequence[Node] = (), reward_server: Node | None = None
) -> str:
    """The layout as text: one line in words; on GPUs also a line per node, with its ranks, engines and their devices,
    and one for the GPUs of the reward's server, if it has any.
    """
    lines = _lines(place, nodes, sampling_nodes)
    if reward_server:
        lines.append(f"the reward's server: on GPUs {','.join(reward_server.devices)} of {reward_server.address}")
    return "\n    ".join(lines)


def _lines(place: Placement, nodes: Sequence[Node], sampling_nodes: Sequence[Node]) -> list[str]:
    ranks, engines = _count(place.num_ranks, "training rank"), _count(place.num_engines, "engine")
    if place.critic:
        ranks = f"{_count(place.num_ranks, 'rank')} of the actor, {place.num_critic_ranks} of the critic"

    # On CPU the nodes have no numbered devices: one line says it all.
    if not nodes or not nodes[0].devices:
        apart = f", {engines} on CPU of {_listed(sampling_nodes)}" if sampling_nodes else ""
        what = ranks if sampling_nodes else f"{ranks} and {engines}"
        return [f"layout: {what} on CPU" + f" of {_listed(nodes)}" * bool(nodes) + apart]

    # On GPUs a title, and a table with a row for each node.
    words = "colocated, taking turns" if place.colocated else "split"
    each = _count(place.gpus_per_engine, "GPU")
    on = _count(place.nnodes, "node") + f" and {_count(place.sampling_nodes, 'node')}" * bool(sampling_nodes)
    title = f"layout {words}: {ranks} and {engines} of {each} on {on}"
    trained = ("actor", "on GPUs", "critic", "on GPUs") if place.critic else ("train", "on GPUs")
    rows: list[tuple[str, ...]] = [("node", *trained, "sample", "on GPUs")]
    rows += [_row(place, number, node) for number, node in enumerate(nodes[:NODES_SHOWN])]
    rows += [
        (node.address, *[""] * len(trained), *_sampled(place, number, node))
        for number, node in enumerate(sampling_nodes[:NODES_SHOWN])
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for some in (nodes, sampling_nodes):
        if len(some) > NODES_SHOWN:
            lines.append(f"... and {_count(len(some) - NODES_SHOWN, 'node')} more like {some[0].address}")
    return [title, *lines]


def _row(place: Placement, number: int, node: Node) -> tuple[str, ...]:
    trained = _ranks_on(number, node, place.first_training, place.training)
    if place.critic:
        trained += _ranks_on(number, node, place.per_node - place.critic, place.critic)
    return (node.address, *trained, *(("", "") if place.sampling_nodes else _sampled(place, number, node)))


def _ranks_on(number: int, node: Node, first: int, count: int) -> tuple[str, ...]:
    """The ranks on a node, and their devices, of a role that has `count` devices of each node from `first` on."""
    return _numbers("rank", number * count, count), ",".join(node.devices[first : first + count])


def _sampled(place: Placement, number: int, node: Node) -> tuple[str, str]:
    count = place.engines_per_node
    return _numbers("engine", number * count, count), ",".join(node.devices[: place.sampling])


def _listed(nodes: Sequence[Node]) -> str:
    shown = ", ".join(node.address for node in nodes[:NODES_SHOWN]) + ", ..." * (len(nodes) > NODES_SHOWN)
    return f"{_count(len(nodes), 'node')}: {shown}"


def _numbers(name: str, first: int, count: int) -> str:
    return f"{name} {first}" if count == 1 else f"{name}s {first}-{first + count - 1}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


# A run on fewer nodes than it asks for, where `trainer.min_nnodes` allows that: after one was lost, say.


def on_nodes_that_are_there(config: Config, device: str, wait_s: float = JOINING_S) -> Config:
    """The config for the largest number of training nodes, from `min_nnodes` to `nnodes`, that Ray's cluster has and
    the settings allow; waits at most `wait_s` for all nodes. If there is no such number, `config` unchanged, for which
    starting the run then fails.
    """
    trainer = config.trainer
    if trainer.min_nnodes is None:
        return config

    # Nodes may still be joining the cluster.
    wanted = trainer.nnodes
    deadline = time.monotonic() + wait_s
    while (found := _nodes_to_train_on(config, device)) < wanted and time.monotonic() < deadline:
        time.sleep(LOOK_S)

    # The largest number that the settings allow: batch sizes, say, need not divide by every number of ranks.
    for nnodes in range(min(found, wanted), trainer.min_nnodes - 1, -1):
        fewer = replace(config, trainer=replace(trainer, nnodes=nnodes))
        try:
            check_supported(fewer)
        except ConfigError as error:
            log.warning("training on %d of trainer.nnodes=%d nodes is not possible: %s", nnodes, wanted, error)
            continue
        if nnodes < wanted:
            log.warning(
                "the cluster offers %d of trainer.nnodes=%d nodes: training on %d (trainer.min_nnodes=%d)",
                found,
                wanted,
                nnodes,
                trainer.min_nnodes,
            )
        return fewer
    return config


def _nodes_to_train_on(config: Config, device: str) -> int:
    """The number of nodes that are up and have what a node of the run needs, without those that only sample, and
    without one for the reward's server where no other GPUs are left for it.
    """
    place = placement_of(config, device)
    kind, amount = ResourcePool(place.nnodes, place.per_node, device).needed
    offered = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
    present = sum(has >= amount for has in offered)
    server = config.reward.n_gpus if device == "cuda" else 0
    beside = any(has >= server if has < amount else has - amount >= server for has in offered)
    return present - place.sampling_nodes - (0 if beside else 1)
