"""A run on fewer nodes than it asks for, where `trainer.min_nnodes` allows that: after one was lost, say."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import ray

from verl.config import Config, check_supported
from verl.config.rules.placement import placement_of
from verl.errors import ConfigError
from verl.single_controller.resource_pool import JOINING_S, ResourcePool

LOOK_S = 1.0

log = logging.getLogger(__name__)


def on_nodes_that_are_there(config: Config, device: str, wait_s: float = JOINING_S) -> Config:
    """The config for the largest number of training nodes, from `min_nnodes` to `nnodes`, that Ray's cluster has and
    the settings allow; waits at most `wait_s` for all nodes. If there is no such number, `config` unchanged, for which
    starting the run then fails.
    """
    trainer = config.trainer
    if trainer.min_nnodes is None:
        return config
    wanted = trainer.nnodes
    deadline = time.monotonic() + wait_s
    while (found := _nodes_to_train_on(config, device)) < wanted and time.monotonic() < deadline:
        time.sleep(LOOK_S)
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
    """Nodes that are up and have what a node of the run needs, without those that only sample, and without one for the
    reward's server where no other GPUs are left for it.
    """
    place = placement_of(config, device)
    kind, amount = ResourcePool(place.nnodes, place.per_node, device).needed
    offered = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
    present = sum(has >= amount for has in offered)
    server = config.reward.n_gpus if device == "cuda" else 0
    beside = any(has >= server if has < amount else has - amount >= server for has in offered)
    return present - place.sampling_nodes - (0 if beside else 1)
