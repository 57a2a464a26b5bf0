"""Joins the Ray cluster that RAY_ADDRESS names and moves files between the disks of two of its nodes; prints JSON.

python folder_copies_probe.py RUN_DIR, a folder that each node has for itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray

from verl.config import load_config
from verl.errors import VerlError
from verl.single_controller import folder_copies
from verl.single_controller.cluster import connect
from verl.storage import digest
from verl.trainer.layout import Pools, reserve_pools

BYTES = bytes(range(256)) * 41  # longer than a chunk


class Disk:
    """What a rank sees on its node."""

    def write(self, path: str, values: bytes) -> tuple[int, str]:
        Path(path).write_bytes(values)
        return digest(Path(path))

    def read(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).is_file() else None

    def names(self, folder: str) -> list[str]:
        return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


def probe(pools: Pools, run_dir: Path) -> dict[str, Any]:
    there = ray.remote(Disk).options(**pools.training.plain_options(1)).remote()  # node 0 may be another than this one
    found: dict[str, Any] = {"table": pools.table}
    state, copies = run_dir / "state" / ".global_step_1.writing", pools.copies
    (state / "actor").mkdir(parents=True)
    copies.make([state / "actor"])
    written = ray.get(there.write.remote(str(state / "actor" / "__1_0.distcp"), BYTES))
    arrived = copies.begin_bringing(state).result()
    found["arrived"] = arrived == {"actor/__1_0.distcp": written} and written == digest(state / "actor/__1_0.distcp")
    (state / "manifest.json").write_text("{}")
    with copies.lent(state):
        found["lent"] = ray.get(there.read.remote(str(state / "actor" / "__1_0.distcp"))) == BYTES
    found["left"] = ray.get(there.names.remote(str(run_dir)))

    elsewhere = run_dir.with_name("another")
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("{}")
    ray.get(there.__ray_call__.remote(_make, str(elsewhere)))
    try:
        with copies.lent(elsewhere):
            pass
    except VerlError as error:
        found["another"] = f"{type(error).__name__}: {error}"
    ray.get(there.write.remote(str(elsewhere / "manifest.json"), b"{}"))
    with copies.lent(elsewhere):
        pass
    found["kept"] = ray.get(there.names.remote(str(elsewhere)))
    found["mine"] = Disk().names(str(elsewhere))
    return found


def _make(disk: Disk, folder: str) -> None:
    Path(folder).mkdir()


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    folder_copies.CHUNK = 1000
    connect(worker_logs=False)
    run_dir.mkdir()
    sizes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}"]
    config = load_config("tinywiki", ["actor_rollout_ref.model.path=m", *sizes, "trainer.gather_state=true"])
    pools = reserve_pools(config, "cpu")
    print(json.dumps(probe(pools, run_dir)))
    pools.release()
