"""A version of the weights on its way from the trainer to the engines: one bucket after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl.rollout.exported_weights import ExportedWeights, merge_exports
from verl.rollout.weight_sender import WeightSender


@dataclass(frozen=True)
class WeightStream:
    """All buckets of a version, in order. `release` ends it, also half-way. With a `sender` they can be broadcast."""

    buckets: Iterator[ExportedWeights]
    release: Callable[[], object]
    sender: WeightSender | None = None


Exported = Callable[[], Sequence[ExportedWeights]]


def stream_buckets(
    export: Callable[[int], Exported], send: Callable[[Mapping[str, bytes]], None] | None = None
) -> Iterator[ExportedWeights]:
    """The buckets of a version. `export(index)` begins to export one and returns how to wait for all ranks' parts;
    `send` begins to send one, by its `exports`.

    A bucket may be reused when the next one is asked for. While one is sent and read, the next is exported if there is
    room.
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
