"""Starts Ray with the GPUs of its arguments and prints, as JSON, the devices that each role of each layout is given.

python placement_probe.py NUM_GPUS key=value ...; the environment is the user's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray

from verl.config import load_config
from verl.config.placement import placement_of
from verl.single_controller.cluster import RAY_SETTINGS
from verl.trainer.layout import reserve_pools


class Role:
    """What a role's process finds when it starts, and whether Ray thinks that it holds GPUs of its own."""

    def found(self) -> tuple[str | None, list[Any]]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_gpu_ids()


def devices_of_roles(overrides: list[str]) -> dict[str, Any]:
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", *overrides])
    pools, place = reserve_pools(config, "cuda"), placement_of(config, "cuda")
    options = [pool.actor_options(rank) for pool in (pools.training, pools.critic) for rank in range(pool.world_size)]
    ranks = place.gpus_per_engine
    options += [pools.sampling.actor_options(i * ranks, ranks) for i in range(place.num_engines)]
    roles = [ray.remote(Role).options(**option).remote() for option in options]
    found = ray.get([role.found.remote() for role in roles])
    for role in roles:
        ray.kill(role)
    pools.release()
    assert all(not held for _, held in found)
    visible = [devices for devices, _ in found]
    size = pools.training.world_size
    engines = size + pools.critic.world_size
    parts = {"actor": visible[:size], "critic": visible[size:engines], "engines": visible[engines:]}
    return parts | {"table": pools.table}


if __name__ == "__main__":
    os.environ.update(RAY_SETTINGS)
    ray.init(num_cpus=4, num_gpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
    print(json.dumps([devices_of_roles(case.split()) for case in sys.argv[2:]]))
