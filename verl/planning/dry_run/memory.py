"""Bytes of live tensors: now, and at the peak since `restart`.

`held` and `peak_held` are the same with what PyTorch's CUDA allocator holds around it (`segments`).
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass
from functools import partial

import torch

from verl.planning.dry_run.torch_private import storage_id

UNIT = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MEDIUM, MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
STEP = 2 * 2**20


@dataclass(frozen=True)
class Peak:
    """The bytes of tensors, and the bytes that the allocator holds for them."""

    allocated: int
    held: int


class Memory:
    """Tracks storages from their first use in an operation until they are freed."""

    def __init__(self) -> None:
        self.live = 0
        self._segments = Segments()
        self._blocks: dict[int, tuple[int, Block | None]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = Peak(0, 0)

    @property
    def now(self) -> Peak:
        return Peak(self.live, self._segments.held)

    def restart(self) -> None:
        """Reset the peak to what is in use now."""
        self.peak = self.now

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is known."""
        key = storage_id(storage)
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            self._take(key, storage.nbytes())

    def hide(self, storage: torch.UntypedStorage) -> None:
        """Do not count a storage, which is host memory."""
        key = storage_id(storage)
        self._watched[key] = weakref.ref(storage, partial(self._gone, key))
        self._take(key, 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size: by changing it, FSDP2 frees and takes memory."""
        key = storage_id(storage)
        if key in self._watched:
            self._give(key)
            self._take(key, storage.nbytes())

    def give_back(self) -> None:
        """Return the allocator's cached memory to the device."""
        self._segments.give_back()

    def workspace(self, num_bytes: int) -> None:
        """Count workspace that one operation takes and frees."""
        if num_bytes:
            self._take(-1, num_bytes)
            self._give(-1)

    def _take(self, key: int, num_bytes: int) -> None:
        self._blocks[key] = num_bytes, self._segments.take(num_bytes) if num_bytes else None
        self.live += num_bytes
        self.peak = Peak(max(self.peak.allocated, self.live), max(self.peak.held, self._segments.held))

    def _give(self, key: int) -> None:
        num_bytes, block = self._blocks.pop(key)
        self.live -= num_bytes
        if block is not None:
            self._segments.give(block)

    def _gone(self, key: int, _: object) -> None:
        self._give(key)
        del self._watched[key]


# The memory that PyTorch's CUDA allocator must hold for what is allocated: it takes segments and splits them.


@dataclass(eq=False)
class Block:
    """A part of a segment, in a chain with its neighbours."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


class Segments:
    """The segments of the allocator; `held`: bytes of those in use."""

    def __init__(self) -> None:
        self.held = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then by address
        self._end = 0  # of all segments

    def take(self, num_bytes: int) -> Block:
        """Allocate a block of at least `num_bytes`."""
        size = max(UNIT, -(-num_bytes // UNIT) * UNIT)
        small = size <= SMALL

        # The smallest free block that is large enough; else a new segment, behind all others: addresses decide between
        # free blocks of one size.
        free = self._free[small]
        place = bisect.bisect_left(free, size, key=lambda entry: entry[0])
        if place < len(free):
            block = free.pop(place)[2]
        else:
            block = Block(self._end, _segment_size(size), small)
            self._end += block.size

        # What is left of it stays free, if it is worth it.
        if block.is_segment:
            self.held += block.size
        block.free = False
        if block.size - size >= UNIT if small else block.size - size > SMALL:
            self._cut(block, size)
        return block

    def give(self, block: Block) -> None:
        """Free a block."""
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                free = self._free[other.small]
                del free[bisect.bisect_left(free, (other.size, other.address), key=lambda entry: entry[:2])]
                _join(block, other)
        if block.is_segment:
            self.held -= block.size
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def give_back(self) -> None:
        """Release unused segments, like torch.cuda.empty_cache."""
        for free in self._free.values():
            free[:] = [entry for entry in free if not entry[2].is_segment]

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        bisect.insort(self._free[rest.small], (rest.size, rest.address, rest))


def _segment_size(size: int) -> int:
    """The size of the segment that the allocator takes for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM else -(-size // STEP) * STEP


def _join(block: Block, other: Block) -> None:
    """Let `block` take in its neighbour."""
    block.size += other.size
    if other is block.before:
        block.address, block.before = other.address, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
