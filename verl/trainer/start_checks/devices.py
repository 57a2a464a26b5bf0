"""The devices that a run asks for, where it would look for them: on its Ray cluster's nodes, or on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import ray

from verl.config import Config
from verl.config.rules.placement import critic_gpus, devices_of_nodes, fits_on_nodes
from verl.trainer.start_checks.finding import Finding, judge


def check_devices(config: Config, ray_address: str | None, here: int, cores: int) -> Finding:
    """Check the devices. `ray_address`: the value of RAY_ADDRESS; `here`, `cores`: GPUs and cores of this machine."""
    if not ray_address and len(devices_of_nodes(config)) > 1:
        return Finding("ok", "devices", "on the nodes of the Ray cluster, which are checked when the run starts")
    if ray_address in (None, "", "local"):
        return judge_nodes(config, [here], cores, "this machine")
    try:
        return judge_nodes(config, gpus_of_cluster(str(ray_address)), cores, f"the Ray cluster {ray_address}")
    except (OSError, RuntimeError, ValueError) as error:
        return Finding("warn", "devices", f"the Ray cluster {ray_address} did not answer: {error}")


def judge_nodes(config: Config, gpus: Sequence[int], cores: int, where: str) -> Finding:
    """Compare the `gpus` of each node with the settings; without GPUs, workers share the `cores` of a node."""
    trainer = config.trainer
    wanted, needed = trainer.n_gpus_per_node, sorted(devices_of_nodes(config), reverse=True)
    if trainer.device == "cpu" or (trainer.device == "auto" and not any(gpus)):
        todo = f"lower trainer.n_gpus_per_node to {cores} or fewer: workers that share a core slow each other down"
        return judge(wanted <= cores, "devices", f"{wanted} workers on {cores} CPU cores", todo, "warn")
    critic = f", {critic_gpus(config)} of each node that trains for the critic alone" if critic_gpus(config) else ""
    server = config.reward.n_gpus
    besides = f", and {server} of one node for the reward's server (reward.n_gpus)" if server else ""
    found = f"{_counted(needed)} are required{critic}{besides}; {where} has {', '.join(map(str, gpus))}"
    enough = fits_on_nodes(config, gpus, server)
    return judge(enough, "devices", found, "lower trainer.n_gpus_per_node or trainer.nnodes, or set trainer.device=cpu")


def _counted(needed: Sequence[int]) -> str:
    """The GPUs of all nodes in words: `8 GPUs on 2 node(s) and 4 on 1`."""
    by_size = Counter(needed)
    [first, *others] = by_size.items()
    return f"{first[0]} GPUs on {first[1]} node(s)" + "".join(f" and {gpus} on {nodes}" for gpus, nodes in others)


def gpus_of_cluster(address: str) -> list[int]:
    """GPUs of each live node. Without such a cluster Ray raises OSError, RuntimeError or ValueError."""
    joined = not ray.is_initialized()
    if joined:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    finally:
        if joined:
            ray.shutdown()
