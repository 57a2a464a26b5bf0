"""Hosts on one machine: each with a network, processes, a name and shared memory of its own (Linux namespaces).

They are joined by a bridge, and share the disk as the nodes of a cluster share a file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from e2e_world import ENV, ROOT
from time_limits import uncounted

NETWORK = "10.77.0."
# As Debian and Ubuntu have it: a host's own name is not the address by which others reach it.
HOSTS_FILE = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
# Held by whoever has hosts up: two networks with a Ray cluster each have not enough memory on a small machine.
LOCK = Path(tempfile.gettempdir()) / f"verl-tests-hosts-of-{os.geteuid()}.lock"
LOCK_S = 7200.0
# Reaps what loses its parent, as the first process of a host has to.
INIT = "sleep infinity & wait"
UNSHARED = ("--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
ENTERED = ("--mount", "--net", "--uts", "--pid")
# How long Ray waits before it gives a silent node up, and a node before it gives up a silent head: a quarter of what it
# waits by itself, a minute and three.
QUICK_TO_GIVE_UP = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}


class Command(subprocess.Popen[str]):
    """What runs on a host. Signals go to it, not to `nsenter`, whose child it is."""

    def send_signal(self, number: int) -> None:
        for child in _children_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)


class Host:
    """A host that is up until `power_off`."""

    def __init__(self, number: int, folder: Path, shared_memory_mib: int) -> None:
        self.name, self.address, self.folder = f"host{number}", f"{NETWORK}{number}", folder
        names = folder / f"{self.name}.hosts"
        names.write_text(HOSTS_FILE.format(name=self.name))
        set_up = (
            f"hostname {self.name}; mount --bind {names} /etc/hosts; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; "
            f"mount -t tmpfs -o size={shared_memory_mib}m tmpfs /dev/shm; ip link set lo up; echo up; {INIT}"
        )
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *UNSHARED, "bash", "-ec", set_up],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != "up\n":
            pytest.skip(f"no namespaces here: {self._process.stderr.read().strip()}")
        [self.pid] = _children_of(self._process.pid)  # the first process in it, as seen from outside

    def start(self, *command: str, log: Path | None = None, stdin: int | None = None, **variables: str) -> Command:
        """Run a command on this host, in the project's folder. What it says is added to `log`, or is for the caller."""
        with log.open("ab") if log else contextlib.nullcontext(subprocess.PIPE) as output:
            return Command(
                ["nsenter", f"--target={self.pid}", *ENTERED, "env", "-C", str(ROOT), *command],
                env=ENV | variables,
                stdin=stdin,
                stdout=output,
                stderr=output,
                text=True,
            )

    def run(self, *command: str, timeout: float = 1800, **variables: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end; an assertion error when that is not well."""
        process = self.start(*command, **variables)
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == 0, f"{command} on {self.name}: {process.returncode}\n{output}\n{errors}"
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def output(self, *command: str, timeout: float = 1800, **variables: str) -> str:
        """What a command on this host says until its end, whatever its status."""
        process = self.start(*command, **variables)
        try:
            return "".join(process.communicate(timeout=timeout))
        finally:
            process.kill()

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of this host with `title` in their command line."""
        return [process for process in psutil.process_iter() if self._has(process, title)]

    def _has(self, process: psutil.Process, title: str) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            ours = os.path.samefile(f"/proc/{process.pid}/ns/pid", f"/proc/{self.pid}/ns/pid")
            return ours and title in " ".join(process.cmdline())
        return False

    def power_off(self) -> None:
        """All of its processes end at once."""
        self._process.kill()
        self._process.communicate()


class Network(contextlib.ExitStack):
    """`hosts`, each of which reaches every other. While it is up, any other on this machine waits."""

    def __init__(self, number: int, folder: Path, shared_memory_mib: int = 1024) -> None:
        super().__init__()
        if os.geteuid():
            pytest.skip("namespaces without a user's own need root")
        self._folder, self._shared_memory_mib = folder, shared_memory_mib
        self.hosts: list[Host] = []
        self.address = ""  # of the Ray cluster on them, if there is one
        try:
            self.enter_context(alone())
            self._bridge = Host(0, folder, 1)
            self.callback(self._bridge.power_off)
            self._bridge.run("ip", "link", "add", "bridge", "type", "bridge")
            self._bridge.run("ip", "link", "set", "bridge", "up")
            for _ in range(number):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> Host:
        """One more host."""
        host = Host(len(self.hosts) + 1, self._folder, self._shared_memory_mib)
        self.callback(host.power_off)
        port = _port_of(host)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        # The number names a process as seen from outside: not from within the bridge's own.
        net_only = ("nsenter", f"--target={self._bridge.pid}", "--net", "ip", "link")
        subprocess.run([*net_only, "add", port, *peer], check=True)
        subprocess.run([*net_only, "set", port, "master", "bridge", "up"], check=True)
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        self.hosts.append(host)
        return host

    def cut(self, host: Host) -> None:
        """Nobody reaches the host, nor it anybody, until `mend`."""
        self._bridge.run("ip", "link", "set", _port_of(host), "down")

    def mend(self, host: Host) -> None:
        self._bridge.run("ip", "link", "set", _port_of(host), "up")

    def isolate(self, *hosts: Host) -> None:
        """None of these reaches another of these any more; they and the others do reach each other."""
        for host in hosts:
            self._bridge.run("bridge", "link", "set", "dev", _port_of(host), "isolated", "on")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold `LOCK`, which the kernel lets go when this process ends. The wait for it is not part of a test's time."""
    with LOCK.open("a") as file:
        with uncounted():
            end = time.monotonic() + LOCK_S
            while not _locked(file.fileno()):
                assert time.monotonic() < end, f"{LOCK} was held by another process for {LOCK_S:.0f} s"
                time.sleep(0.2)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _children_of(pid: int) -> list[int]:
    """None when it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _port_of(host: Host) -> str:
    return f"to-{host.name}"


@contextlib.contextmanager
def ray_cluster(hosts: Sequence[Host], num_cpus: int = 2, num_gpus: int = 0) -> Iterator[str]:
    """A raylet on every host, the first one the head; its address. `num_gpus` of each are said, not there."""
    address = f"{hosts[0].address}:6379"
    with contextlib.ExitStack() as at_the_end:
        for host in hosts:
            at_the_end.enter_context(ray_node(host, address, num_cpus, num_gpus=num_gpus))
        yield address


@contextlib.contextmanager
def ray_node(
    host: Host, address: str, num_cpus: int = 2, job_server: bool = False, num_gpus: int = 0, **variables: str
) -> Iterator[None]:
    """A raylet on `host`, the head if the cluster's `address` is on it. `num_gpus` are said, not there. `variables` are
    Ray's settings.
    """
    head = ("head",) if job_server else ("head", "--include-dashboard=false")
    where = head if address.startswith(f"{host.address}:") else (address,)
    size = (f"--num-gpus={num_gpus}", f"--num-cpus={num_cpus}", f"--object-store-memory={200 * 2**20}")
    ray = _started_ray(host, (*where, *size), variables)
    try:
        yield
    finally:
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.communicate(timeout=60)
        ray.kill()


def _started_ray(host: Host, arguments: Sequence[str], variables: dict[str, str]) -> Command:
    """On a busy machine Ray gives up starting, or reaching the head: it is tried three times."""
    log = host.folder / f"{host.name}.ray.log"
    for _ in range(3):
        log.write_text("")
        command = ("bash", "scripts/cluster/ray_node.sh", *arguments)
        ray = host.start(*command, log=log, RAY_NODE_IP=host.address, PYTHONUNBUFFERED="1", **variables)
        while ray.poll() is None:
            if "Ray runtime started" in log.read_text():
                return ray
            time.sleep(0.1)
    raise AssertionError(f"no Ray on {host.name}:\n{log.read_text()}")


def wait_for_port(
    host: Host, address: str, timeout_s: float = 120, of: Command | None = None, log: Path | None = None
) -> None:
    """Until a connection from `host` to `address` (host:port) is accepted.

    Fails at once when the server ends, the command `of`, with what it has written to `log`.
    """
    connect = f"exec 3<>/dev/tcp/{address.replace(':', '/')}"
    waiting = host.start("bash", "-c", f"until ({connect}) 2>/dev/null; do sleep 0.1; done")
    end = time.monotonic() + timeout_s
    try:
        while waiting.poll() is None:
            said = log.read_text()[-6000:] if log else ""
            assert of is None or of.poll() is None, f"the server of {address} ended with {of.returncode}\n{said}"
            assert time.monotonic() < end, f"nobody answers at {address} after {timeout_s:.0f} s\n{said}"
            time.sleep(0.1)
        assert waiting.returncode == 0, waiting.communicate()
    finally:
        waiting.terminate()
        waiting.communicate()
