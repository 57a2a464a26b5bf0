"""Who sits where: the devices of a run, divided among the roles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl.config import Config
from verl.config.placement import Placement, placement_of
from verl.single_controller import Node, ResourcePool
from verl.single_controller.nodes import check_nodes

NODES_SHOWN = 8


class Pools(NamedTuple):
    """`whole` is what Ray was asked for, and is to be released."""

    whole: ResourcePool
    sampling: ResourcePool
    training: ResourcePool
    table: str


def reserve_pools(config: Config, device: str) -> Pools:
    """Take the devices of a run. Raises ConfigError or WorkerError when there are none like that, or when several nodes
    do not reach each other or do not share the run's folder.
    """
    place, timeout_s = placement_of(config, device), config.trainer.step_timeout_s
    whole = ResourcePool(place.nnodes, place.per_node, device)
    whole.reserve(timeout_s)
    try:
        check_nodes(whole, Path(config.trainer.default_local_dir), timeout_s)
    except BaseException:
        whole.release()
        raise
    training = whole.part(place.per_node - place.training, place.training)
    return Pools(whole, whole.part(0, place.sampling), training, layout_table(place, whole.nodes))


def layout_table(place: Placement, nodes: Sequence[Node]) -> str:
    """One line in words; on GPUs also a line a node: its ranks and engines, and the devices of each."""
    ranks, engines = _count(place.num_ranks, "training rank"), _count(place.num_engines, "engine")
    if not nodes or not nodes[0].devices:
        shown = ", ".join(node.address for node in nodes[:NODES_SHOWN]) + ", ..." * (len(nodes) > NODES_SHOWN)
        return f"layout: {ranks} and {engines} on CPU" + f" of {_count(place.nnodes, 'node')}: {shown}" * bool(nodes)
    words = "colocated, taking turns" if place.colocated else "split"
    each = _count(place.gpus_per_engine, "GPU")
    title = f"layout {words}: {ranks} and {engines} of {each} on {_count(place.nnodes, 'node')}"
    rows: list[tuple[str, ...]] = [("node", "train", "on GPUs", "sample", "on GPUs")]
    rows += [_row(place, number, node) for number, node in enumerate(nodes[:NODES_SHOWN])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(nodes) > NODES_SHOWN:
        lines.append(f"... and {_count(len(nodes) - NODES_SHOWN, 'node')} more like these")
    return "\n    ".join([title, *lines])


def _row(place: Placement, number: int, node: Node) -> tuple[str, ...]:
    per_node = place.sampling // place.gpus_per_engine
    return (
        node.address,
        _numbers("rank", number * place.training, place.training),
        ",".join(node.devices[place.per_node - place.training :]),
        _numbers("engine", number * per_node, per_node),
        ",".join(node.devices[: place.sampling]),
    )


def _numbers(name: str, first: int, count: int) -> str:
    return f"{name} {first}" if count == 1 else f"{name}s {first}-{first + count - 1}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
