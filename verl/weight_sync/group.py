"""Broadcast of weights: a process group of the trainer's first rank, which sends, and of all ranks of the engines on
other hosts, which receive. NCCL between GPUs, gloo between CPUs.

It is separate from PyTorch's default group: engines come and go, and a broken group is dissolved and formed again
without ending a process. All failures are a `WeightSyncError`.
Needs torch only, so that the trainer imports no inference engine and an engine no Ray.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import WeightSyncError, translated
from verl.process.by_name import in_words
from verl.weight_sync.memory import Located, bucket_of, host_name, tensors_in

JOIN_S = 60.0  # until all have joined
BROADCAST_S = 120.0  # per bucket; at most half of NCCL's own limit, at which it would end the process
POLL_S = 0.001
LOOK_S = 0.2  # between looks whether the group has been ended
CONNECT_S = 10.0
SENDER = 0
ENDED = "ended"  # in the group's store, once a broadcast cannot succeed any more
RECEIVED = "received"  # in the exports of a bucket that engines have received; the value is its ticket


@dataclass(frozen=True)
class Rendezvous:
    """The address where the members of a group meet, and their number."""

    host: str
    port: int
    size: int


class WeightGroup:
    """A member of a group. Raises WeightSyncError when not all `rendezvous.size` members have joined within `JOIN_S`.

    A member that fails ends the group: all others that wait for it fail, too, instead of waiting until their limit.
    store: the sender's own, which the others connect to. device: where this member's buckets are.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: torch.device, store: dist.Store | None = None
    ) -> None:
        self.device = device
        with _as_weight_sync_error(
            f"rank {rank} of {rendezvous.size} could not join the group at {rendezvous.host}:{rendezvous.port}"
        ):
            self._store = store or _connected(rendezvous, JOIN_S)
            self._store.set_timeout(timedelta(seconds=JOIN_S))
            with self._ended_by_failure():
                # NCCL itself would wait for missing members forever.
                self._store.set(f"here/{rank}", "")
                everyone = [f"here/{number}" for number in range(rendezvous.size)]
                self._wait_until(lambda: self._store.check(everyone), JOIN_S, LOOK_S / 4)
                self._group = _formed(dist.PrefixStore("group", self._store), rendezvous, rank, device)
                if device.type == "cuda":  # NCCL connects only now
                    self._finish(self._begin(torch.zeros(1, device=device)), JOIN_S)

    def begin(self, bucket: torch.Tensor) -> Any:
        """Start to send `bucket`, or to receive into it. It is flat, on this member's device, and of the same size for
        all. Returns what `finish` waits for.
        """
        with _as_weight_sync_error("the broadcast of weights failed"), self._ended_by_failure():
            return self._begin(bucket)

    def finish(self, begun: Any) -> None:
        """Wait until the bucket is sent or received, at most `BROADCAST_S`."""
        with _as_weight_sync_error("the broadcast of weights failed"), self._ended_by_failure():
            self._finish(begun, BROADCAST_S)

    def leave(self) -> None:
        """Leave, even while others wait for this member: their calls fail."""
        self._group.abort()
        del self._group

    def _begin(self, bucket: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        return self._group.broadcast([bucket], options)

    def _finish(self, work: Any, limit_s: float) -> None:
        self._wait_until(work.is_completed, limit_s, POLL_S)
        work.wait()  # raises what went wrong

    def _wait_until(self, is_done: Callable[[], bool], limit_s: float, poll_s: float) -> None:
        """Wait by polling: `wait` has no timeout in NCCL's usual mode and cannot be interrupted."""
        begun = looked = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now > begun + limit_s:
                raise WeightSyncError(f"not done after {limit_s:g} s")
            if now > looked + LOOK_S:
                looked = now
                if self._store.check([ENDED]):
                    raise WeightSyncError("another member has failed")
            time.sleep(poll_s)

    @contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            with suppress(Exception):  # the sender, who has the store, is gone
                self._store.set(ENDED, "")
            raise


def end_group(rendezvous: Rendezvous) -> None:
    """Make all members fail that wait for another one: call it when a member has died. Never raises."""
    with suppress(Exception):  # there is no sender any more either
        _connected(rendezvous, CONNECT_S).set(ENDED, "")


class WeightSource:
    """The sender's part, in the process of the trainer's first rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: WeightGroup | None = None
        self._sending: tuple[Any, torch.Tensor] | None = None

    def open(self, host: str, size: int) -> Rendezvous:
        """Open a rendezvous for a new group, at this node's address `host`."""
        self.leave()
        with _as_weight_sync_error(f"no group could be opened at {host}"):
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._rendezvous = Rendezvous(host, self._store.port, size)
        return self._rendezvous

    def join(self) -> None:
        """Join the group; returns when all have joined."""
        self._group = WeightGroup(self._rendezvous, SENDER, self._device, self._store)

    def send(self, exports: Mapping[str, bytes]) -> None:
        """Start to send a bucket, once the last one is sent. `exports`: those of an `ExportedWeights`.

        With GPUs it is copied to this rank's GPU first: the bucket is in the host's memory, where each of the host's
        ranks has written its part.
        """
        self._finish()
        if self._group is None:
            raise WeightSyncError("the trainer's first rank is in no group")
        bucket = bucket_of(Located.unpacked(exports[host_name()])).to(self._device)
        self._sending = (self._group.begin(bucket), bucket)

    def leave(self) -> None:
        """Leave the group; does nothing without one."""
        group, self._group, self._sending = self._group, None, None
        if group is not None:
            group.leave()

    def _finish(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None and self._group is not None:
            self._group.finish(sending[0])


class WeightReceiver:
    """The receiving part, in the process of one rank of an engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: WeightGroup | None = None
        self._received: tuple[bytes, dict[str, torch.Tensor]] | None = None

    def join(self, rendezvous: Rendezvous, rank: int) -> None:
        self.leave()
        self._group = WeightGroup(rendezvous, rank, self._device)

    def receive(self, packed: bytes, ticket: bytes) -> None:
        """Receive a bucket and keep it under `ticket`. `packed`: a `Located`, for the places of its weights."""
        if self._group is None:
            raise WeightSyncError("this rank is in no group")
        located = Located.unpacked(packed)
        self._received = None
        bucket = torch.empty(located.num_bytes, dtype=torch.uint8, device=self._device)
        self._group.finish(self._group.begin(bucket))
        self._received = (ticket, tensors_in(bucket, located.places))

    def take(self, ticket: bytes) -> dict[str, torch.Tensor]:
        """The bucket of `ticket`, which is not kept any longer."""
        received, self._received = self._received, None
        if received is None or received[0] != ticket:
            raise WeightSyncError(f"bucket {ticket.decode()} was not received here")
        return received[1]

    def leave(self) -> None:
        group, self._group, self._received = self._group, None, None
        if group is not None:
            group.leave()


def _connected(rendezvous: Rendezvous, limit_s: float) -> dist.Store:
    return dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=limit_s))


def _formed(store: dist.Store, rendezvous: Rendezvous, rank: int, device: torch.device) -> Any:
    if device.type == "cuda":
        with _failures_are_ours():
            return dist.ProcessGroupNCCL(store, rank, rendezvous.size, dist.ProcessGroupNCCL.Options())
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # private, but `init_process_group` lets nobody choose the address
    options._timeout = timedelta(seconds=BROADCAST_S)
    # This host's address, as the sender's host sees it. By default gloo resolves the host's own name, which is the
    # loopback address on Debian and Ubuntu.
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=JOIN_S) as connection:
        own_address = str(connection.getsockname()[0])
    options._devices = [gloo.create_device(hostname=own_address)]
    return gloo(store, rank, rendezvous.size, options)


@contextmanager
def _failures_are_ours() -> Iterator[None]:
    """Context in which groups are created whose failures are left to us: by default PyTorch ends the process when an
    NCCL group fails.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _as_weight_sync_error(what: str) -> AbstractContextManager[None]:
    """Turn any error into a WeightSyncError: weights can be sent another way, so none of them ends a run."""
    return translated(Exception, lambda error: WeightSyncError(f"{what}: {in_words(error)}"))
