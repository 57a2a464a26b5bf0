"""A bucket of weights on its way from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verl.engine.files.checksum import Sums, added
from verl.errors import WeightSyncError


@dataclass(frozen=True)
class ExportedWeights:
    """A bucket of weights in memory that the engines can read.

    exports: what opens it, by where the reader must be: on a GPU, or on a host with its shared memory.
    sums: checksums of its weights (`checksum`); in one rank's export, of that rank's own values.
    index, count: number of the bucket, and of all buckets of the version.
    next_fits: whether there is room to export the next one while this one is read.
    """

    exports: Mapping[str, bytes]
    version: int
    sums: Sums
    index: int = 0
    count: int = 1
    next_fits: bool = False


def merge_exports(parts: Sequence[ExportedWeights]) -> ExportedWeights:
    """The exports of all ranks as one. Raises `WeightSyncError` when they are not of the same bucket."""
    if len({(part.version, part.index, part.count, part.next_fits) for part in parts}) > 1:
        found = ", ".join(f"version {part.version} bucket {part.index + 1} of {part.count}" for part in parts)
        raise WeightSyncError(f"the trainer's ranks export different weights: {found}")
    exports = {place: payload for part in parts for place, payload in part.exports.items()}
    return replace(parts[0], exports=exports, sums=added(part.sums for part in parts))
