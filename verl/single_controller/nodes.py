"""Several nodes: what each has to have of the others, asked before anything is loaded there."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import ray

from verl.errors import ConfigError, WorkerError
from verl.single_controller.resource_pool import ResourcePool
from verl.single_controller.waiting import wait_for
from verl.storage import writing

CONNECT_S = 10.0
SEEN_S = 10.0  # a network file system may show a new file late
PAIRS_SHOWN = 8


class NodeProbe:
    """Runs on one node and tries what the run will need there."""

    def listen(self) -> tuple[str, int]:
        """Host and port where others can connect from now on."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=4096)
        return host, self._server.getsockname()[1]

    def unreached(self, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
        """By host, why there is no connection to it."""
        with ThreadPoolExecutor(32) as pool:
            tried = zip(addresses, pool.map(_why_not_reached, addresses), strict=True)
            return {host: why for (host, _), why in tried if why}

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those that are not there after a while."""
        deadline = time.monotonic() + SEEN_S
        while (left := [path for path in paths if not os.path.exists(path)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def check_nodes(pool: ResourcePool, run_dir: Path, timeout_s: float, gather: bool = False) -> list[int]:
    """Raise WorkerError when nodes do not reach each other, ConfigError when one does not see the folders of the run.

    Those are the folder that the run was started in, where relative paths begin, and `run_dir`. With `gather` a node
    may have another `run_dir`; returns the numbers of those that have. Fine on one node.
    """
    if pool.nnodes == 1:
        return []
    ask = partial(wait_for, timeout_s=timeout_s)
    probes = [ray.remote(NodeProbe).options(**pool.node_options(node)).remote() for node in range(pool.nnodes)]
    hosts = [node.address for node in pool.nodes]
    try:
        addresses = ask([probe.listen.remote() for probe in probes], "asking the nodes for a port")
        unreached = ask([probe.unreached.remote(addresses) for probe in probes], "trying the ports of all nodes")
        _require_reached(dict(zip(hosts, unreached, strict=True)))
        with _marker_in(run_dir) as marker:
            paths = [os.getcwd(), str(marker)]
            missing = ask(
                [probe.missing.remote(paths) for probe in probes], "looking for the run's folder on its nodes"
            )
    finally:
        for probe in probes:
            ray.kill(probe)
    _require_seen(dict(zip(hosts, missing, strict=True)))
    apart = [node for node, paths in enumerate(missing) if paths]
    if apart and not gather:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir} is another folder on {_shown([hosts[node] for node in apart])}: the "
            "ranks there write their part of the state. Set it to a folder of a file system that all nodes share, or "
            "trainer.gather_state=true: that part then lies on their own disk until it is copied to the driver's node"
        )
    return apart


def check_working_dir(pool: ResourcePool, timeout_s: float) -> None:
    """Raise ConfigError when the first node of the pool lacks the folder that the run was started in."""
    probe = ray.remote(NodeProbe).options(**pool.node_options(0)).remote()
    try:
        [missing] = wait_for([probe.missing.remote([os.getcwd()])], "looking for the run's folder", timeout_s)
    finally:
        ray.kill(probe)
    _require_seen({pool.address: missing})


def use_network_of(address: str) -> None:
    """Let gloo in this process connect by the interface that has `address`, unless the environment names one.

    Left to itself it takes the address that the host's own name has, which is a loopback on Debian and Ubuntu. NCCL
    looks for an interface itself, and leaves out loopbacks.
    """
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """The network interface that has the address, as `ip address` names it; None when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return None


def _why_not_reached(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""


def _require_reached(unreached: Mapping[str, Mapping[str, str]]) -> None:
    pairs = [f"{one} does not reach {other} ({why})" for one, of in unreached.items() for other, why in of.items()]
    if pairs:
        more = f", and {len(pairs) - PAIRS_SHOWN} more pairs" if len(pairs) > PAIRS_SHOWN else ""
        raise WorkerError(
            f"{', '.join(pairs[:PAIRS_SHOWN])}{more}: the nodes of a run connect to each other on ports that the "
            "system chooses; open all ports between them (firewall, security group), and start Ray with the addresses "
            "of a network that they share (ray start --node-ip-address=...)"
        )


def _require_seen(missing: Mapping[str, Sequence[str]]) -> None:
    here = os.getcwd()
    if without := [host for host, paths in missing.items() if here in paths]:
        raise ConfigError(
            f"{here}, where this run was started, is not there on {_shown(without)}, and relative paths begin there: "
            "start it in a folder that all nodes share or have, or by `ray job submit --working-dir .`, which copies it"
        )


def _shown(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - PAIRS_SHOWN} more nodes" if len(hosts) > PAIRS_SHOWN else ""
    return ", ".join(hosts[:PAIRS_SHOWN]) + more


@contextmanager
def _marker_in(folder: Path) -> Iterator[Path]:
    """A file that is there for a moment."""
    with writing(folder):
        file, name = tempfile.mkstemp(prefix=".seen-by-all-nodes-", dir=folder.absolute())
        os.close(file)
    try:
        yield Path(name)
    finally:
        with suppress(OSError):
            os.unlink(name)
