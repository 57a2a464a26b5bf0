"""Weights from trainer to samplers through the host's shared memory.

Every rank of the actor writes its own rows into the bucket, at their place and in the engines' number format: nothing
is gathered, and nobody holds a copy. Where the rows of a weight are spread over several hosts, the ranks gather it, and
the ranks of each host write it there together. Engines on the same host map the memory and load from it. There is room
for two buckets, so that one is written while the other is read.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.engine.device.sharding import local, own_values, row_shards
from verl.engine.files.checksum import copy_checked, key_of, require_finite, word_sum
from verl.errors import WeightSyncError
from verl.process.storage import OwnedFolder
from verl.weight_sync.buckets import ExportedWeights, Version, WeightPlace, gathered, places_of

SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # only the parent: a private folder is made in it
FOLDER_PREFIX = "verl-weights-"


@dataclass(frozen=True)
class Located:
    """A bucket in the file at `path`, which has `capacity` bytes: from byte `offset` on, with the `places` of its
    weights.
    """

    path: str
    capacity: int
    offset: int
    places: tuple[WeightPlace, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the bucket in bytes."""
        return self.places[-1].end

    def packed(self) -> bytes:
        places = [[place.name, str(place.dtype), list(place.shape), place.start] for place in self.places]
        return json.dumps([self.path, self.capacity, self.offset, places]).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> Located:
        path, capacity, offset, packed_places = json.loads(packed)
        places = tuple(
            WeightPlace(name, getattr(torch, dtype.removeprefix("torch.")), torch.Size(shape), start)
            for name, dtype, shape, start in packed_places
        )
        return cls(path, capacity, offset, places)


def weight_folder(parent: Path | None = None) -> OwnedFolder:
    """A folder for exports, in shared memory if there is any; files left in it take memory."""
    return OwnedFolder(FOLDER_PREFIX, parent or _shared_memory())


def host_name() -> str:
    """A name that is the same in all processes that share this memory, and in no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.is_file() else os.uname().nodename
    return f"host {name}, memory {_shared_memory().stat().st_dev}"


class HostBuckets:
    """Memory for buckets that the ranks of a host share; each rank has its own object.

    folder: the driver's. Ranks on a host that does not see it create their own. limit: bytes of a bucket.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.capacity = 0
        self._owned: OwnedFolder | None = None

    def export(self, version: Version, index: int) -> ExportedWeights:
        """Write this rank's part of bucket `index`. A collective: all ranks call it, with the same plan.

        Raises `NumericalError` naming the first weight that has a NaN or an Inf, and `WeightSyncError` when there is
        not enough memory.
        """
        named = version.named
        buckets = [tuple(places_of([(n, named[n]) for n in names], version.dtype)) for names in version.plan]
        sizes = [bucket[-1].end for bucket in buckets]
        self._open(room_for(sizes, self.limit))
        # Alternately from the beginning and up to the end, so that any two neighbours fit, whatever their sizes.
        offset = self.capacity - sizes[index] if index % 2 else 0
        sums = {}
        for place in buckets[index]:
            sums[key_of(place.name, place.dtype, place.shape)] = self._write(named[place.name], place, offset)
        located = Located(self._path, self.capacity, offset, buckets[index])
        fits = index + 1 < len(sizes) and sizes[index] + sizes[index + 1] <= self.capacity
        return ExportedWeights({self._host: located.packed()}, version.number, sums, index, len(sizes), fits)

    def release(self) -> None:
        """Does nothing: the memory is kept for the next version, as new pages would have to be cleared first."""

    def close(self) -> None:
        """Remove what the driver does not remove."""
        if self._owned is not None:
            self._owned.remove()

    def _write(self, tensor: torch.Tensor, place: WeightPlace, offset: int) -> int:
        """Write this rank's part of a weight; returns the checksum of its own values."""
        # This host has all of the weight: no rank needs the values of others.
        size = place.dtype.itemsize
        begin = offset + place.start
        target = self.room[begin : begin + place.shape.numel() * size].view(place.dtype)
        own = own_values(tensor)
        part = self._part_to_write(tensor)
        if part is not None:
            values = local(tensor).reshape(-1)[: part.stop - part.start]
            total = copy_checked(place.name, values, target[part], part.start * size)
            return total if own.stop > own.start else 0

        # It does not: all ranks gather the weight, and those of this host write equal shares of it.
        values = gathered([(place.name, tensor)], place.dtype)[place.name].view(-1)
        require_finite(place.name, values[own])
        here = self._ranks_here
        share = slice(*(len(values) * part // len(here) for part in (here.index(_rank()), here.index(_rank()) + 1)))
        target[share].copy_(values[share])
        return word_sum(values[own], own.start * size)

    def _part_to_write(self, tensor: torch.Tensor) -> slice | None:
        """The part of its own values that this rank writes, maybe empty; None if a host lacks a part of the weight."""
        # A weight that every rank has whole is written by the first rank of the host. One that is not cut by rows, or
        # of which the host lacks a part, has to be gathered (None).
        shards = row_shards(tensor)
        if shards is None:
            whole = not isinstance(tensor, DTensor)
            return slice(0, tensor.numel() if _rank() == self._ranks_here[0] else 0) if whole else None
        # With several copies of the model, ranks of a host may hold the same shard: the first of them writes it.
        places: dict[str, dict[int, int]] = {host: {} for host in self._hosts}  # the writing rank, by host and place
        for group in shards.groups:
            for place, rank in enumerate(group):
                places[self._hosts[rank]].setdefault(place, rank)
        if any(len(held) < len(shards.ranks) for held in places.values()):
            return None
        writes = places[self._host][shards.place] == _rank()
        return shards.values if writes else slice(0, 0)

    def _open(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        self._host = host_name()
        self._hosts = everyones(self._host)
        first = self._ranks_here[0]
        made = everyones(_tried(lambda: self._make(capacity)) if _rank() == first else "")
        if errors := [answer for answer in made if isinstance(answer, WeightSyncError)]:
            raise errors[0]
        self._path = str(made[first])
        self.room = _whole_file(self._path, capacity)
        self.capacity = capacity

    @property
    def _ranks_here(self) -> list[int]:
        return [rank for rank, host in enumerate(self._hosts) if host == self._host]

    def _make(self, capacity: int) -> str:
        if self.folder.is_dir():
            return make_room(self.folder, capacity)
        self._owned = self._owned or weight_folder()
        return make_room(self._owned.path, capacity)


def make_room(folder: Path, capacity: int) -> str:
    """Create a file for buckets, replacing any other in the folder. Returns its path. Raises WeightSyncError.

    Its memory is allocated now: a page that is missing later would raise a signal (SIGBUS), not an error.
    """
    try:
        for old in folder.glob("buckets-*"):
            old.unlink()
        file, path = tempfile.mkstemp(prefix="buckets-", dir=folder)  # a new name: readers keep the old one mapped
        try:
            os.posix_fallocate(file, 0, capacity)
        finally:
            os.close(file)
    except OSError as error:
        raise WeightSyncError(
            f"no room for {capacity / 2**20:.0f} MiB of weights in shared memory: {error}; free it or remount it "
            "larger, or lower actor_rollout_ref.rollout.weight_sync.bucket_mib"
        ) from error
    return path


def room_for(sizes: Sequence[int], limit: int) -> int:
    """Bytes for the largest bucket, and for any two consecutive ones that are together at most two times `limit`."""
    pairs = [first + second for first, second in pairwise(sizes) if first + second <= 2 * limit]
    return max(*sizes, *pairs, 0)


def _shared_memory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def open_shared(payload: bytes) -> dict[str, torch.Tensor]:
    """The weights of a bucket, in the trainer's memory: they change when the bucket after the next is written."""
    located = Located.unpacked(payload)
    return tensors_in(bucket_of(located), located.places)


def bucket_of(located: Located) -> torch.Tensor:
    """uint8 [num_bytes]: the bucket, as a view of its memory."""
    return memory_of(located)[located.offset :][: located.num_bytes]


def tensors_in(bucket: torch.Tensor, places: Sequence[WeightPlace]) -> dict[str, torch.Tensor]:
    """The weights of a bucket, which is uint8 on any device, as views of it."""
    found = {}
    for place in places:
        values = bucket[place.start :][: place.shape.numel() * place.dtype.itemsize]
        found[place.name] = values.view(place.dtype).view(place.shape)
    return found


def memory_of(located: Located) -> torch.Tensor:
    """uint8 [capacity]: the file of the bucket, which stays mapped until another one is requested."""
    return _mapped(located.path, located.capacity)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def everyones(answer: Any) -> list[Any]:
    """The answers of all ranks, by rank."""
    if not dist.is_initialized():
        return [answer]
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


@lru_cache(maxsize=1)
def _mapped(path: str, capacity: int) -> torch.Tensor:
    if not Path(path).is_file():
        raise WeightSyncError(f"the trainer's memory {path} is not there; did the trainer end?")
    return _whole_file(path, capacity)


def _whole_file(path: str, capacity: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=capacity, dtype=torch.uint8)


def _tried(make: Callable[[], str]) -> str | WeightSyncError:
    try:
        return make()
    except WeightSyncError as error:  # the other ranks wait for an answer
        return error
