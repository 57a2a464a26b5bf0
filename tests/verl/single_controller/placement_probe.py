"""The devices that each role of a run is given. As a script, it starts Ray and prints them as JSON, for each layout.

python placement_probe.py NUM_GPUS "key=value ..." ...; the environment is the user's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray

from verl.config import load_config
from verl.config.rules.placement import placement_of
from verl.single_controller.cluster import RAY_SETTINGS, init_patiently
from verl.trainer.layout import reserve_pools


def devices_of_roles(*overrides: str) -> dict[str, Any]:
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", *overrides])
    pools, place = reserve_pools(config, "cuda"), placement_of(config, "cuda")
    training = [pools.training.actor_options(rank) for rank in range(pools.training.world_size)]
    critic = [pools.critic.actor_options(rank) for rank in range(pools.critic.world_size)]
    ranks = place.gpus_per_engine
    sampling = [pools.sampling.actor_options(number * ranks, ranks) for number in range(place.num_engines)]
    parts = {"actor": training, "critic": critic, "engines": sampling}
    found = {name: devices_seen(options) for name, options in parts.items() if options != training or name == "actor"}
    found.setdefault("critic", found["actor"])  # in the same place
    pools.release()
    return found | {"table": pools.table}


def devices_seen(options: list[dict[str, Any]]) -> list[str | None]:
    """What processes with these options find when they start; Ray thinks that none of them holds GPUs of its own."""

    class Role:  # of no module that its process would have to import
        def found(self) -> tuple[str | None, list[Any]]:
            return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_gpu_ids()

    roles = [ray.remote(Role).options(**own).remote() for own in options]
    found = ray.get([role.found.remote() for role in roles])
    for role in roles:
        ray.kill(role)
    assert not any(held for _, held in found)
    return [visible for visible, _ in found]


if __name__ == "__main__":
    os.environ.update(RAY_SETTINGS)
    init_patiently(num_cpus=4, num_gpus=int(sys.argv[1]), log_to_driver=False)
    print(json.dumps([devices_of_roles(*case.split()) for case in sys.argv[2:]]))
