"""Several nodes: checks before anything is loaded there (do they reach each other, do they see the run's folders?), and
those that only sample, of which a run continues without one that is lost, and uses one that joins.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import ray

from verl.errors import ConfigError, VerlError, WorkerError
from verl.process.storage import writing
from verl.single_controller.waiting import wait_for
from verl.single_controller.worker_group import JOINING_S, ResourcePool

log = logging.getLogger(__name__)

CONNECT_S = 10.0
SEEN_S = 10.0  # a network file system may show a new file late
PAIRS_SHOWN = 8


class NodeProbe:
    """Runs on one node and tries what the run will need there."""

    def listen(self) -> tuple[str, int]:
        """Host and port at which others can connect from now on."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=4096)
        return host, self._server.getsockname()[1]

    def unreached(self, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
        """The hosts that cannot be reached, and why."""
        with ThreadPoolExecutor(32) as pool:
            tried = zip(addresses, pool.map(_why_not_reached, addresses), strict=True)
            return {host: why for (host, _), why in tried if why}

    def missing(self, paths: Sequence[str]) -> list[str]:
        """The paths that do not exist here, even after a while."""
        deadline = time.monotonic() + SEEN_S
        while (left := [path for path in paths if not os.path.exists(path)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def check_nodes(pool: ResourcePool, run_dir: Path, timeout_s: float, gather: bool = False) -> list[int]:
    """Raise WorkerError when nodes do not reach each other, ConfigError when one does not see the folders of the run.

    These are the folder that the run was started in, where relative paths start, and `run_dir`. With `gather` a node
    may have its own `run_dir`; returns the numbers of such nodes. Does nothing on one node.
    """
    if pool.nnodes == 1:
        return []
    # Every node listens at a port and tries those of all others; then it looks for the folders, and for a new file.
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

    # The folder that the run was started in must be everywhere, its own folder only if nothing is copied.
    _require_seen(dict(zip(hosts, missing, strict=True)))
    apart = [node for node, paths in enumerate(missing) if paths]
    if apart and not gather:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir} is a different folder on {_shown([hosts[node] for node in apart])}, "
            "where ranks write their part of the state. Set it to a folder on a file system that all nodes share, or "
            "set trainer.gather_state=true, which copies that part to the driver's node"
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
    """Make gloo and NCCL in this process use the interface that has `address`, unless the environment names one.

    By default gloo uses the address of the host's own name, which is a loopback on Debian and Ubuntu, and NCCL the
    first interface that is none, which may be a bridge of Docker's. NCCL only meets there: its data takes InfiniBand
    where there is some.
    """
    if interface := interface_of(address):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


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
            f"{here}, where this run was started and relative paths start, does not exist on {_shown(without)}: start "
            "the run in a folder that exists on all nodes, or by `ray job submit --working-dir .`, which copies it"
        )


def _shown(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - PAIRS_SHOWN} more nodes" if len(hosts) > PAIRS_SHOWN else ""
    return ", ".join(hosts[:PAIRS_SHOWN]) + more


@contextmanager
def _marker_in(folder: Path) -> Iterator[Path]:
    """A temporary file in `folder`, which other nodes look for."""
    with writing(folder):
        file, name = tempfile.mkstemp(prefix=".seen-by-all-nodes-", dir=folder.absolute())
        os.close(file)
    try:
        yield Path(name)
    finally:
        with suppress(OSError):
            os.unlink(name)


LOOK_S = 0.5


@dataclass
class SamplingNodes:
    """Nodes with `workers_per_node` devices each, except those in `taken` (addresses); a pool for each node."""

    workers_per_node: int
    device: str
    taken: Collection[str]
    pools: list[ResourcePool] = field(default_factory=list)
    _refused: dict[str, str] = field(default_factory=dict)  # addresses, and why

    def reserve(self, nnodes: int, timeout_s: float) -> None:
        """Reserve `nnodes` nodes. Raises WorkerError if the cluster does not get that many."""
        deadline = time.monotonic() + min(JOINING_S, timeout_s)
        # Nodes may still be joining the cluster, so it is asked again until the time is over.
        while len(self.pools) < nnodes:
            self.join(nnodes)
            if len(self.pools) < nnodes and time.monotonic() > deadline:
                kind, amount = self._pool("").needed
                refused = "".join(f"; {address}: {why}" for address, why in self._refused.items())
                raise WorkerError(
                    f"the Ray cluster offers {len(self.pools)} of {nnodes} nodes (actor_rollout_ref.rollout.nnodes) "
                    f"with {amount:g} {kind} each besides those that train ({', '.join(self.taken)}); see `ray status`"
                    f"{refused}"
                )
            time.sleep(LOOK_S * (len(self.pools) < nnodes))

    def join(self, most: int) -> list[ResourcePool]:
        """Reserve nodes that have joined the cluster, until there are `most`. One that cannot be reserved is not tried
        again until it has left the cluster and come back.
        """
        new: list[ResourcePool] = []
        for address in self._candidates() if len(self.pools) < most else []:
            pool = self._pool(address)
            try:
                pool.reserve(JOINING_S)
                check_working_dir(pool, JOINING_S)
            except VerlError as error:
                pool.release()
                self._refuse(address, str(error))
                continue
            self.pools.append(pool)
            new.append(pool)
            if len(self.pools) == most:
                break
        return new

    def leave_out(self, address: str) -> None:
        """Do not let a node join, because it is used for something else; one in the pools stays."""
        self.taken = [*self.taken, address]

    def give_up(self, address: str, unusable: str = "") -> None:
        """Release the pool of a node that is lost, or that is `unusable` for the given reason; ignores other nodes."""
        for pool in [pool for pool in self.pools if pool.address == address]:
            self.pools.remove(pool)
            pool.release()
        if unusable:
            self._refuse(address, unusable)

    def release(self) -> None:
        for pool in list(self.pools):
            self.give_up(pool.address)

    def _refuse(self, address: str, why: str) -> None:
        log.warning("node %s does not sample: %s", address, why)
        self._refused[address] = why

    def _candidates(self) -> list[str]:
        kind, amount = self._pool("").needed
        alive = {node["NodeManagerAddress"]: node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]}
        self._refused = {address: why for address, why in self._refused.items() if address in alive}
        known = {pool.address for pool in self.pools}.union(self.taken, self._refused)
        return sorted(address for address, has in alive.items() if has >= amount and address not in known)

    def _pool(self, address: str) -> ResourcePool:
        return ResourcePool(1, self.workers_per_node, self.device, only_on=address)


def is_alive(address: str) -> bool:
    """Whether the cluster has a live node at `address`."""
    return any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())
