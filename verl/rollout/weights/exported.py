"""A bucket of weights on its way from the trainer to the engines, which lies where they can read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verl.errors import WeightSyncError
from verl.rollout.weights.checksum import Sums, added


@dataclass(frozen=True)
class ExportedWeights:
    """A bucket of weights that lies where the engines can read it.

    exports: what opens it, by the place that a reader has to be at: a GPU, or a host with its shared memory.
    sums: checksums of the weights in it (`checksum`); in what one rank returns, of the values that are its own.
    index, count: which bucket of the version it is, and of how many.
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
