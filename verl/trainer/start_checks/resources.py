"""What a run needs before it starts: devices where it would look for them, the run folder and its disk, the network.

The network is a port for the ranks to meet at, the Ray cluster that is named, and the hosts of the retriever. All ports
are free ones that the system chooses, so none can be taken.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import ray

from verl.config import Config
from verl.config.rules.placement import critic_gpus, devices_of_nodes, fits_on_nodes
from verl.config.rules.predicates import anchor_moves
from verl.process.storage import nearest_folder
from verl.single_controller.cluster import reach
from verl.trainer.start_checks.finding import Finding, judge
from verl.trainer.start_checks.models import Models

GIB = 2**30


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
    # For example `8 GPUs on 2 node(s) and 4 on 1`.
    [(most, times), *others] = Counter(needed).items()
    counted = f"{most} GPUs on {times} node(s)" + "".join(f" and {fewer} on {nodes}" for fewer, nodes in others)
    found = f"{counted} are required{critic}{besides}; {where} has {', '.join(map(str, gpus))}"
    enough = fits_on_nodes(config, gpus, server)
    return judge(enough, "devices", found, "lower trainer.n_gpus_per_node or trainer.nnodes, or set trainer.device=cpu")


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


FLOAT32 = 4  # bytes


def check_folder(folder: Path) -> Finding:
    """Check that the run folder can be written, by a file where it will be, which is removed."""
    existing = nearest_folder(folder)
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(4096))
            file.flush()
    except OSError as error:
        todo = "give it write access and room, or set trainer.default_local_dir to another folder"
        return Finding("FAIL", "run folder", f"{folder}: {error}", todo)
    return Finding("ok", "run folder", f"{folder} can be written")


def check_one_checkpoint(config: Config, models: Models, free: int) -> Finding:
    """Whether `free` bytes hold the first checkpoint."""
    needed, _ = checkpoint_bytes(config, models, steps=None)
    found = f"{config.trainer.default_local_dir}: {_in_words(free)} free, one checkpoint takes {_in_words(needed)}"
    todo = "free some space, or set trainer.default_local_dir to a larger disk"
    return judge(free >= needed, "disk", found, todo)


def check_all_checkpoints(config: Config, models: Models, steps: int | None, free: int) -> Finding:
    """Whether `free` bytes hold all checkpoints that a run of `steps` steps keeps."""
    needed, count = checkpoint_bytes(config, models, steps)
    found = f"{config.trainer.default_local_dir}: {_in_words(free)} free, {_in_words(needed)} needed"
    todo = "raise trainer.save_freq, set trainer.max_ckpt_to_keep, or set trainer.default_local_dir to a larger disk"
    return judge(free >= needed, "disk", f"{found} for {count} checkpoints", todo)


def checkpoint_bytes(config: Config, models: Models, steps: int | None) -> tuple[float, int]:
    """Bytes of all checkpoints together, and how many there are; `steps` None: unknown, one is counted.

    A checkpoint holds models in float32, and the state: the weights (of a model with adapters, those), two moments of
    AdamW of what is trained, and the anchor's weights. Adapters are also beside the model that they are merged into.
    One more than `max_ckpt_to_keep` is counted for the best, and one for that which is being written.
    """
    trainer, keep = config.trainer, config.trainer.max_ckpt_to_keep
    if trainer.val_only:
        return 0.0, 0
    count = 1 if steps is None or trainer.save_freq < 1 else -(-steps // trainer.save_freq)
    if keep is not None:
        count = min(count, keep + 2)
    trained = [models.policy] + ([models.critic] if models.critic else [])
    exported = sum(shape.num_params + shape.num_adapted for shape in trained)
    values = exported + sum((shape.num_adapted or shape.num_params) + 2 * shape.num_trained for shape in trained)
    # An anchor that moves is saved as a model, too, beside its part of the state.
    if models.anchor is not None:
        values += (2 if anchor_moves(config) else 1) * models.anchor.num_params
    return float(FLOAT32 * values * count), count


def _in_words(num_bytes: float) -> str:
    """A size in GiB, or in MiB where that says more."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


LOOPBACK = "127.0.0.1"
TIMEOUT_S = 5.0
DEFAULT_PORTS = {"http": 80, "https": 443}


def check_network(config: Config, ray_address: str | None) -> Iterator[Finding]:
    """Check the network. `ray_address`: the value of RAY_ADDRESS."""
    nnodes = len(devices_of_nodes(config))
    yield check_port(LOOPBACK) if nnodes == 1 else Finding("ok", "ports", "the nodes test each other's at the start")
    yield check_ray(ray_address, nnodes)
    if config.do_search and config.retriever.engine is None:
        yield from check_hosts(config.retriever.url)


def check_port(host: str) -> Finding:
    """Check that a port on this machine's address `host` can be opened and connected to."""
    try:
        with socket.create_server((host, 0)) as server:
            socket.create_connection(server.getsockname()[:2], TIMEOUT_S).close()
    except OSError as error:
        todo = "bring the interface up (ip link)"
        return Finding("FAIL", "ports", f"this machine cannot connect to its own port on {host}: {error}", todo)
    return Finding("ok", "ports", f"{host} can be listened on")


def check_ray(address: str | None, nnodes: int) -> Finding:
    """Whether the head of the cluster at `address` (host:port or ray://host:port) can be reached."""
    if not address:
        found = f"no RAY_ADDRESS: {'a new one of' if nnodes == 1 else 'the cluster that runs on'} this machine"
        todo = f"for {nnodes} nodes start a cluster with `ray start --head`, or set RAY_ADDRESS=host:port"
        return judge(nnodes == 1, "ray", found, todo, "warn")
    if address == "local":
        todo = f"for {nnodes} nodes set RAY_ADDRESS=host:port"
        return judge(nnodes == 1, "ray", "RAY_ADDRESS=local: a new cluster of one node", todo)
    if address == "auto":
        return Finding("ok", "ray", "RAY_ADDRESS=auto: a cluster that runs on this machine (not checked)")
    try:
        reach(address)
    except (OSError, ValueError) as error:
        todo = "start it there (ray start --head --port=6379), or unset RAY_ADDRESS"
        return Finding("FAIL", "ray", f"RAY_ADDRESS={address} cannot be reached: {error}", todo)
    return Finding("ok", "ray", f"RAY_ADDRESS={address} can be reached")


def check_hosts(urls: str) -> Iterator[Finding]:
    """Whether the hosts of `urls` (with commas between) have an address; whether servers answer is checked later."""
    for url in urls.split(","):
        try:
            host, port = _host_and_port(url.strip())
            address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, ValueError) as error:
            todo = "set retriever.url to http://host:port/retrieve"
            yield Finding("FAIL", "retriever host", f"{url.strip()}: {error}", todo)
        else:
            yield Finding("ok", "retriever host", f"{host} is {address}")


def _host_and_port(address: str) -> tuple[str, int]:
    """Host and port of an address with or without a scheme. Raises ValueError."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    if not parts.hostname or port is None:
        raise ValueError("this is not host:port")
    return parts.hostname, port
