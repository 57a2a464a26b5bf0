"""Joins the Ray cluster that RAY_ADDRESS names. For each case it divides a run among the GPUs of a dry run and reserves
that; it prints, as JSON, how many devices of how many nodes the roles and the server of the reward got.

python judge_probe.py GPUS RUN_DIR "OVERRIDE OVERRIDE ..." ...
"""

from __future__ import annotations

import json
import sys
from typing import Any

from verl.config import load_config
from verl.single_controller.cluster import connect
from verl.trainer.dry_run.place import located, parse_gpus
from verl.trainer.layout import reserve_pools

REWARD = ("reward.launch='serve --port $PORT'", "reward.kwargs={url: 'http://{server}/v1'}", "trainer.device=auto")


def reserved(gpus: str, run_dir: str, overrides: list[str]) -> dict[str, Any]:
    folder = f"trainer.default_local_dir={run_dir}"
    config = load_config("tinywiki", ["actor_rollout_ref.model.path=m", folder, *REWARD, *overrides])
    pools = reserve_pools(located(config, parse_gpus(gpus)), "cuda")
    assert pools.reward_server is not None
    sampling = [node for pool in (pools.sampling_nodes.pools if pools.sampling_nodes else []) for node in pool.nodes]
    roles = {node.address: node.devices for node in (*pools.training.nodes, *sampling)}
    [server] = pools.reward_server.nodes
    assert not {*server.devices} & {*roles.get(server.address, ())}
    pools.release()
    beside = server.address in roles
    return {"roles": [len(devices) for devices in roles.values()], "server": len(server.devices), "beside": beside}


if __name__ == "__main__":
    gpus, run_dir, *cases = sys.argv[1:]
    connect(worker_logs=False)
    print(json.dumps([reserved(gpus, run_dir, case.split()) for case in cases]))
