"""The network: a port for the ranks to meet at, the Ray cluster that is named, and the hosts of the retriever.

All ports are free ones that the system chooses, so none can be taken.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from verl.config import Config
from verl.config.rules.placement import devices_of_nodes
from verl.single_controller.cluster import reach
from verl.trainer.start_checks.finding import Finding, judge

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
