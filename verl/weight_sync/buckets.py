"""Which weights travel together from the trainer to the sampler: buckets of a bounded size, in the model's order.

The trainer exports one bucket, the engines load it, and its memory is reused for another: the memory beside the shards
does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.engine.device.sharding import RowShards, on_mesh, row_shards
from verl.engine.files.checksum import NamedTensors, Sums, added
from verl.errors import WeightSyncError

MIB = 2**20
ALIGNED = 64  # bytes: alignment of weights in a bucket


@dataclass(frozen=True)
class WeightPlace:
    """The place of a weight in its bucket: from byte `start` on, in the engines' number format."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def end(self) -> int:
        """The byte where the next weight may begin."""
        return self.start + _aligned(self.shape.numel() * self.dtype.itemsize)


class Version(NamedTuple):
    """The weights of version `number`, sent in `dtype`; `plan` has the names in each bucket."""

    named: Mapping[str, torch.Tensor]
    plan: Sequence[Sequence[str]]
    dtype: torch.dtype
    number: int


def places_of(named_tensors: NamedTensors, dtype: torch.dtype) -> list[WeightPlace]:
    """Places for the weights, one after the other."""
    places: list[WeightPlace] = []
    for name, tensor in named_tensors:
        start = places[-1].end if places else 0
        places.append(WeightPlace(name, dtype if tensor.is_floating_point() else tensor.dtype, tensor.shape, start))
    return places


def plan_buckets(named_tensors: NamedTensors, dtype: torch.dtype, bucket_mib: int) -> list[list[str]]:
    """The names in each bucket. No bucket is larger than `bucket_mib`, except for a single tensor that is larger.

    The parts of one layer stay together where they fit, since the engine fuses them (queries, keys and values, say)
    and keeps a part until it has the others. Every rank makes the same plan, from the unsharded shapes.
    """
    limit = bucket_mib * MIB
    groups: list[list[str]] = []
    room = 0
    for names, size in _units(named_tensors, dtype, limit):
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1] += names
        room -= size
    return groups


def gathered(named_tensors: NamedTensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole copies on the model's device, floating-point ones in `dtype`; a collective when the tensors are sharded."""
    return {name: _whole_copy(tensor, dtype) for name, tensor in named_tensors}


def _whole_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    here = on_mesh(tensor)
    cast = here.to(dtype) if here.is_floating_point() else here  # before the gather: less to send
    if not isinstance(cast, DTensor):
        return cast.clone() if cast is here else cast
    shards = row_shards(cast)
    return cast.full_tensor().clone() if shards is None else _gathered_rows(shards)


def _gathered_rows(shards: RowShards) -> torch.Tensor:
    """The whole weight, gathered in place: `full_tensor` would need the memory twice."""
    own, num_rows, each = shards.tensor.to_local(), shards.tensor.shape[0], shards.rows_at(0).stop
    if len(own) < each:
        own = torch.cat([own, own.new_zeros(each - len(own), *own.shape[1:])])
    rows = own.new_empty(each * len(shards.ranks), *own.shape[1:])
    dist.all_gather_single(rows, own.contiguous(), group=shards.group)
    return rows[:num_rows]


def _units(named_tensors: NamedTensors, dtype: torch.dtype, limit: int) -> Iterator[tuple[list[str], int]]:
    """Names that should be in one bucket, with their size in bytes."""
    for _, members in groupby(named_tensors, lambda named: named[0].rsplit(".", 2)[0]):
        sizes = {}
        for name, tensor in members:
            sent_dtype = dtype if tensor.is_floating_point() else tensor.dtype
            sizes[name] = _aligned(tensor.numel() * sent_dtype.itemsize)
        if sum(sizes.values()) <= limit:
            yield list(sizes), sum(sizes.values())
        else:
            yield from (([name], size) for name, size in sizes.items())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


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
