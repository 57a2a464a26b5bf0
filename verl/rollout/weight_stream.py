"""Sends a version of the weights from the trainer to the engines, bucket by bucket, on the way that each engine has.

Engines on the trainer's hosts read its memory. Those on other hosts get a bucket by broadcast: the driver forms the
group, has the bucket sent and received, and dissolves the group when something goes wrong. Without a group the bucket
is relayed: it is read from the trainer's shared memory, sent through Ray's object store, once to each node that asks
for it, from any node that has it, and written to shared memory there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray

from verl.errors import WeightSyncError, WorkerDied
from verl.rollout.fleet import Engine, Fleet
from verl.single_controller import ResourcePool, wait_for
from verl.weight_sync.buckets import ExportedWeights, merge_exports
from verl.weight_sync.group import RECEIVED, Rendezvous, end_group
from verl.weight_sync.memory import Located, bucket_of, host_name, make_room, weight_folder

log = logging.getLogger(__name__)


@dataclass
class WeightSender:
    """The trainer's first rank; its `worker` (a Ray actor) has the methods of `WeightSource`.

    Its calls run one after the other; `send` returns at once, so that the next bucket is exported meanwhile.
    """

    worker: Any
    timeout_s: float
    is_joined: bool = False
    _sending: Any = None

    def open(self, num_ranks: int) -> Rendezvous:
        """Open a rendezvous of this rank and `num_ranks` receivers."""
        rendezvous: Rendezvous = self._ask("open_weight_group", 1 + num_ranks)
        return rendezvous

    def begin_join(self) -> Callable[[], None]:
        """Start joining; returns a function that waits until all have joined."""
        joining = self.worker.join_weight_group.remote()

        def joined() -> None:
            wait_for([joining], "joining the group for weights", self.timeout_s)
            self.is_joined = True

        return joined

    def send(self, exports: Mapping[str, bytes]) -> None:
        """Start sending, if there is a group."""
        if self.is_joined:
            self._sending = self.worker.send_weights.remote(exports)

    def sent(self) -> None:
        """Wait until the bucket is sent. Raises WeightSyncError."""
        wait_for([self._sending], "sending weights", self.timeout_s)

    def leave(self) -> None:
        self.is_joined = False
        self._ask("leave_weight_group")

    def _ask(self, method: str, *args: Any) -> Any:
        return wait_for([getattr(self.worker, method).remote(*args)], method, self.timeout_s)[0]


@dataclass(frozen=True)
class WeightStream:
    """A version of the weights as buckets, in order. `release` ends it at any time. A `sender` can broadcast them."""

    buckets: Iterator[ExportedWeights]
    release: Callable[[], object]
    sender: WeightSender | None = None


ExportCall = Callable[[], Sequence[ExportedWeights]]
"""A function that waits until all ranks have exported their part of a bucket."""


def stream_buckets(
    export: Callable[[int], ExportCall], send: Callable[[Mapping[str, bytes]], None] | None = None
) -> Iterator[ExportedWeights]:
    """The buckets of a version. `export(index)` starts to export one and returns a function that waits for all ranks;
    `send` starts to send one, by its `exports`.

    A bucket's memory may be reused once the next one is requested. While one is sent and read, the next is exported if
    there is room.
    """
    index, begun = 0, export(0)
    while True:
        bucket = merge_exports(begun())
        last = index + 1 == bucket.count
        index += 1
        if send:
            send(bucket.exports)
        # With room for two buckets, the next one is exported while this one is read.
        if bucket.next_fits and not last:
            begun = export(index)
        yield bucket
        if last:
            return
        # Otherwise only now, when the caller is done with this one: its memory is used again.
        if not bucket.next_fits:
            begun = export(index)


class WeightBroadcast:
    """Broadcasts weights from the trainer's first rank to all `ranks_per_engine` ranks of each engine of the fleet."""

    def __init__(self, fleet: Fleet, ranks_per_engine: int) -> None:
        self._fleet, self._ranks_per_engine = fleet, ranks_per_engine
        self._members: list[Engine] = []
        self._end_group: Callable[[], None] = lambda: None

    def prepare(self, sender: WeightSender) -> None:
        """Form a group unless there is one of exactly the current engines."""
        engines = self._fleet.engines
        if sender.is_joined and self._members == engines:
            return
        # The members of a group cannot change, so it is made anew. If that fails, weights are relayed instead.
        self.give_up(sender)
        self._members = list(engines)
        try:
            rendezvous = sender.open(self._ranks_per_engine * len(engines))
        except WeightSyncError as error:
            self._fail(sender, str(error))
            return
        self._end_group = partial(end_group, rendezvous)
        # Joining ends only when all members have come, so it is started for the sender before the engines are asked.
        joined = sender.begin_join()
        places = [(rendezvous, 1 + self._ranks_per_engine * number) for number in range(len(engines))]
        if wrong := self._wrong("join_weight_group", places, joined):
            self._fail(sender, wrong)

    def received(self, bucket: ExportedWeights, sender: WeightSender) -> ExportedWeights | None:
        """The bucket once all engines have it; None if that fails, or there is no group."""
        if not sender.is_joined:
            return None
        [packed, *_] = bucket.exports.values()
        ticket = f"{bucket.index + 1} of {bucket.count} of version {bucket.version}".encode()
        if wrong := self._wrong("receive_weights", [(packed, ticket)] * len(self._members), sender.sent):
            self._fail(sender, wrong)
            return None
        return replace(bucket, exports={**bucket.exports, RECEIVED: ticket})

    def give_up(self, sender: WeightSender) -> None:
        """Dissolve the group, if there is one."""
        members, self._members = self._members, []
        if members:
            sender.leave()
            there = [engine for engine in members if engine in self._fleet.engines]
            self._fleet.ask_each("leave_weight_group", dict.fromkeys(there, ()))

    def _wrong(self, method: str, args: Sequence[tuple[Any, ...]], sender_is_done: Callable[[], None]) -> str:
        """Call `method` on all members, and wait for the sender. Returns what went wrong; empty if nothing did.

        When an engine dies, the group is ended: the others would wait for it until their time limit.
        """
        asked = dict(zip(self._members, args, strict=True))
        answers = self._fleet.ask_each(method, asked, on_loss=self._end_group)
        try:
            sender_is_done()
        except WeightSyncError as error:
            return str(error)
        if len(answers) < len(self._members):
            return "an engine has died"
        return next(filter(None, answers.values()), "")

    def _fail(self, sender: WeightSender, wrong: str) -> None:
        log.warning("weights go through Ray's object store until the next version, not by broadcast: %s", wrong)
        self.give_up(sender)


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
        # Engines on hosts that the trainer exports to need no copy.
        apart = [address for address in self._receivers if self._hosts[address] not in bucket.exports]
        if not apart:
            return bucket
        # `read` returns a reference within a list, which Ray does not resolve: the bytes do not pass through the
        # driver. All receivers write at the same time.
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
