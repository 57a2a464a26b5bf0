"""Joins the Ray cluster that RAY_ADDRESS names and reserves so many of its nodes; prints what came of it as JSON.

python nodes_probe.py NNODES RUN_DIR [OVERRIDE ...]
"""

from __future__ import annotations

import json
import sys

from verl.config import load_config
from verl.errors import VerlError
from verl.single_controller.cluster import connect
from verl.trainer.fewer_nodes import on_nodes_that_are_there
from verl.trainer.layout import reserve_pools

if __name__ == "__main__":
    nnodes, run_dir, *more = sys.argv[1:]
    sizes = [f"trainer.nnodes={nnodes}", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}", *more]
    connect(worker_logs=False)
    try:
        config = load_config("tinywiki", ["actor_rollout_ref.model.path=m", *sizes])
        pools = reserve_pools(on_nodes_that_are_there(config, "cpu", wait_s=2.0), "cpu")
        print(json.dumps({"table": pools.table}))
        pools.release()
    except VerlError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
