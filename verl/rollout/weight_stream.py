"""A version of the weights on its way from the trainer to the engines: buckets, each where the engines can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl.errors import WeightSyncError
from verl.rollout.weight_checksum import Sums, added


@dataclass(frozen=True)
class ExportedWeights:
    """A bucket of weights that lies where the engines can read it.

    exports: what opens it, by the place that a reader has to be at: a GPU, or a host with its shared memory.
    sums: checksums of the weights in it (`weight_checksum`); in what one rank returns, of the values that are its own.
    index, count: which bucket of the version it is, and of how many.
    next_fits: whether there is room to export the next one while this one is read.
    """

    exports: Mapping[str, bytes]
    version: int
    sums: Sums
    index: int = 0
    count: int = 1
    next_fits: bool = False


@dataclass(frozen=True)
class WeightStream:
    """All buckets of a version, in order. `release` ends it, also half-way."""

    buckets: Iterator[ExportedWeights]
    release: Callable[[], object]


Exported = Callable[[], Sequence[ExportedWeights]]


def stream_buckets(export: Callable[[int], Exported]) -> Iterator[ExportedWeights]:
    """The buckets of a version. `export(index)` begins to export one and returns how to wait for all ranks' parts.

    A bucket may be reused when the next one is asked for. While one is read, the next is exported if there is room.
    """
    index, begun = 0, export(0)
    while True:
        bucket = merge_exports(begun())
        last = index + 1 == bucket.count
        index += 1
        if bucket.next_fits and not last:
            begun = export(index)
        yield bucket
        if last:
            return
        if not bucket.next_fits:
            begun = export(index)


def merge_exports(parts: Sequence[ExportedWeights]) -> ExportedWeights:
    """The exports of all ranks as one. Raises `WeightSyncError` when they are not of the same bucket."""
    if len({(part.version, part.index, part.count, part.next_fits) for part in parts}) > 1:
        found = ", ".join(f"version {part.version} bucket {part.index + 1} of {part.count}" for part in parts)
        raise WeightSyncError(f"the trainer's ranks export different weights: {found}")
    exports = {place: payload for part in parts for place, payload in part.exports.items()}
    return replace(parts[0], exports=exports, sums=added(part.sums for part in parts))
