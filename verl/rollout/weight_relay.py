"""Sends weights to hosts that only sample: reads them from the trainer's shared memory, sends them through Ray's object
store, and writes them to shared memory there, where engines read them as those on the trainer's host do.

Ray sends an object once to each node that asks for it, from any node that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from verl.errors import WorkerDied
from verl.single_controller import ResourcePool, wait_for
from verl.weight_sync.buckets import ExportedWeights
from verl.weight_sync.memory import Located, bucket_of, host_name, make_room, weight_folder

CLOSE_S = 2.0


class RelaySender:
    """The sending side, an actor on a node of the trainer."""

    def read(self, exports: dict[str, bytes]) -> list[ray.ObjectRef]:
        """A reference to the bytes of a bucket. `exports`: those of an `ExportedWeights`."""
        return [ray.put(bucket_of(Located.unpacked(exports[host_name()])).numpy())]


class RelayReceiver:
    """The receiving side, an actor on a node that only samples."""

    def __init__(self) -> None:
        self._folder = weight_folder()
        self._capacity = 0
        self._path = ""

    def host(self) -> str:
        """This host's name, as in `ExportedWeights.exports`."""
        return host_name()

    def write(self, values: np.ndarray, exports: dict[str, bytes]) -> bytes:
        """Write a bucket for the engines of this host, which must be done with the last one. Returns what opens it.

        Raises WeightSyncError when there is no room.
        """
        if len(values) > self._capacity:
            self._path, self._capacity = make_room(self._folder.path, len(values)), len(values)
        [packed, *_] = exports.values()
        located = replace(Located.unpacked(packed), path=self._path, capacity=self._capacity, offset=0)
        bucket_of(located).numpy()[:] = values
        return located.packed()

    def close(self) -> None:
        self._folder.remove()


class WeightRelay:
    """The driver's view: one sender on the trainer's first node, a receiver on each node that only samples."""

    def __init__(self, trainer: ResourcePool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sender = ray.remote(RelaySender).options(**trainer.node_options(0)).remote()
        self._receivers: dict[str, Any] = {}  # by address
        self._hosts: dict[str, str] = {}

    def serve(self, pools: Sequence[ResourcePool]) -> None:
        """Have weights sent to the nodes of these pools, and to no others, from now on."""
        wanted = {pool.address: pool for pool in pools}
        for address in self._receivers.keys() - wanted.keys():
            self._drop(address)
        for address in wanted.keys() - self._receivers.keys():
            options = wanted[address].node_options(0)
            self._receivers[address] = ray.remote(RelayReceiver).options(**options).remote()

    def carried(self, bucket: ExportedWeights, lose: Callable[[str, WorkerDied], None]) -> ExportedWeights:
        """The bucket, once it is on all hosts. `lose` is called for nodes whose receiver has died. Raises
        WeightSyncError if a host has no room, WorkerDied if the sender has died.
        """
        self._ask_new_hosts(lose)
        apart = [address for address in self._receivers if self._hosts[address] not in bucket.exports]
        if not apart:
            return bucket
        [[values]] = wait_for([self._sender.read.remote(bucket.exports)], "reading weights to send", self._timeout_s)
        writing = {address: self._receivers[address].write.remote(values, bucket.exports) for address in apart}
        exports = dict(bucket.exports)
        for address, reference in writing.items():
            try:
                [packed] = wait_for([reference], f"sending weights to node {address}", self._timeout_s)
            except WorkerDied as error:
                self._drop(address)
                lose(address, error)
            else:
                exports[self._hosts[address]] = packed
        return replace(bucket, exports=exports)

    def close(self) -> None:
        """End all of its processes."""
        with suppress(Exception):  # of a node that is gone
            closed = [receiver.close.remote() for receiver in self._receivers.values()]
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)
        for address in list(self._receivers):
            self._drop(address)
        ray.kill(self._sender)

    def _drop(self, address: str) -> None:
        with suppress(Exception):  # it is gone
            ray.kill(self._receivers.pop(address))
        self._hosts.pop(address, None)

    def _ask_new_hosts(self, lose: Callable[[str, WorkerDied], None]) -> None:
        """Ask new receivers for the names of their hosts."""
        for address in [address for address in self._receivers if address not in self._hosts]:
            try:
                [host] = wait_for([self._receivers[address].host.remote()], f"asking node {address}", self._timeout_s)
            except WorkerDied as error:
                self._drop(address)
                lose(address, error)
            else:
                self._hosts[address] = host
