"""Sends a version of the weights from the trainer to the engines, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.single_controller import wait_for
from verl.weight_sync.buckets import ExportedWeights, merge_exports
from verl.weight_sync.group import Rendezvous


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
        if bucket.next_fits and not last:
            begun = export(index)
        yield bucket
        if last:
            return
        if not bucket.next_fits:
            begun = export(index)
