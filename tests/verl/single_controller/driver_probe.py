"""A driver on a host: it joins the Ray cluster that RAY_ADDRESS names, and calls the functions below as it is told.

Each line that it reads is JSON of a function's name and arguments. It prints what that returned, after "answer ".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from verl.config import Config, load_config
from verl.errors import VerlError
from verl.planning.dry_run.place import located, parse_gpus
from verl.process.storage import digest
from verl.single_controller import folder_copies
from verl.single_controller.cluster import connect
from verl.trainer.layout import Pools, on_nodes_that_are_there, reserve_pools

REWARD = ("reward.launch='serve --port $PORT'", "reward.kwargs={url: 'http://{server}/v1'}", "trainer.device=auto")
BYTES = bytes(range(256)) * 41  # longer than a chunk


def config_of(nnodes: int, run_dir: str, *more: str) -> Config:
    sizes = (f"trainer.nnodes={nnodes}", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}")
    return load_config("tinywiki", ["actor_rollout_ref.model.path=m", *sizes, *more])


def reserved(nnodes: int, run_dir: str, *more: str) -> str:
    """The table of a run on so many nodes, or why it cannot have them."""
    try:
        pools = reserve_pools(on_nodes_that_are_there(config_of(nnodes, run_dir, *more), "cpu", wait_s=0.5), "cpu")
    except VerlError as error:
        return f"{type(error).__name__}: {error}"
    pools.release()
    return pools.table


def with_judge(gpus: str, run_dir: str, *more: str) -> tuple[list[int], int, bool]:
    """Of a run that is divided among the GPUs of a dry run and reserves that: the numbers of devices that its roles
    have of each node, and of those that the server of the reward has; whether that is beside a role.
    """
    folder = f"trainer.default_local_dir={run_dir}"
    config = load_config("tinywiki", ["actor_rollout_ref.model.path=m", folder, *REWARD, *more])
    pools = reserve_pools(located(config, parse_gpus(gpus)), "cuda")
    assert pools.reward_server is not None
    sampling = [node for pool in (pools.sampling_nodes.pools if pools.sampling_nodes else []) for node in pool.nodes]
    roles = {node.address: node.devices for node in (*pools.training.nodes, *sampling)}
    [server] = pools.reward_server.nodes
    assert not {*server.devices} & {*roles.get(server.address, ())}
    pools.release()
    return [len(devices) for devices in roles.values()], len(server.devices), server.address in roles


def seen_by_a_worker(*names: str) -> list[str | None]:
    """The address of a worker on the second of two nodes, and the values that these variables have there."""
    pools = reserve_pools(on_nodes_that_are_there(config_of(2, "/tmp"), "cpu", wait_s=0.5), "cpu")
    worker = ray.remote(Variables).options(**pools.training.actor_options(1)).remote()
    found: list[str | None] = ray.get(worker.values.remote(names))
    pools.release()
    return found


class Variables:
    """What a worker sees of its environment."""

    def values(self, names: Sequence[str]) -> list[str | None]:
        return [ray.util.get_node_ip_address(), *(os.environ.get(name) for name in names)]


class Disk:
    """What a rank sees on its node."""

    def make(self, folder: str) -> None:
        Path(folder).mkdir()

    def write(self, path: str, values: bytes) -> tuple[int, str]:
        Path(path).write_bytes(values)
        return digest(Path(path))

    def read(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).is_file() else None

    def names(self, folder: str) -> list[str]:
        return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


def copied(folder: str) -> dict[str, Any]:
    """What becomes of files of a run whose folder each of its two nodes has for itself."""
    run_dir = Path(folder)
    run_dir.mkdir()
    folder_copies.CHUNK = 1000
    pools = reserve_pools(config_of(2, folder, "trainer.gather_state=true"), "cpu")
    there = ray.remote(Disk).options(**pools.training.plain_options(1)).remote()  # node 0 may be another than this one
    try:
        return _copied(pools, run_dir, there) | _another(pools, run_dir.with_name("another"), there)
    finally:
        pools.release()


def _copied(pools: Pools, run_dir: Path, there: Any) -> dict[str, Any]:
    state, copies = run_dir / "state" / ".global_step_1.writing", pools.copies
    (state / "actor").mkdir(parents=True)
    copies.make([state / "actor"])
    written = ray.get(there.write.remote(str(state / "actor" / "__1_0.distcp"), BYTES))
    arrived = copies.begin_bringing(state).result()
    whole = arrived == {"actor/__1_0.distcp": written} and written == digest(state / "actor/__1_0.distcp")
    (state / "manifest.json").write_text("{}")
    with copies.on_all_disks(state):
        lent = ray.get(there.read.remote(str(state / "actor" / "__1_0.distcp"))) == BYTES
    return {"arrived": whole, "lent": lent, "left": ray.get(there.names.remote(str(run_dir)))}


def _another(pools: Pools, elsewhere: Path, there: Any) -> dict[str, Any]:
    """Of a folder outside the run's: what is told when the nodes have different ones, what is left of equal ones."""
    told, manifest = "", elsewhere / "manifest.json"
    elsewhere.mkdir()
    manifest.write_text("{}")
    ray.get(there.make.remote(str(elsewhere)))
    try:
        with pools.copies.on_all_disks(elsewhere):
            pass
    except VerlError as error:
        told = f"{type(error).__name__}: {error}"
    ray.get(there.write.remote(str(manifest), b"{}"))
    with pools.copies.on_all_disks(elsewhere):
        pass
    return {"another": told, "kept": ray.get(there.names.remote(str(elsewhere))), "mine": Disk().names(str(elsewhere))}


if __name__ == "__main__":
    connect(worker_logs=False)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("answer", json.dumps(globals()[name](*arguments)), flush=True)
