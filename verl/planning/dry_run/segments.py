"""How much memory PyTorch's CUDA allocator must hold for what is allocated: it takes segments and splits them.

The rules of c10/cuda/CUDACachingAllocator.cpp for one stream: sizes are multiples of 512 bytes; those up to 1 MiB come
from segments of 2 MiB, those up to 10 MiB from segments of 20 MiB, larger ones have segments in steps of 2 MiB; the
smallest free block that is large enough (of several the first) is taken and cut; free neighbours are joined. A segment
in which nothing is left is kept, and taken again; it does not count, since the allocator gives it back rather than run
out of memory: what is counted is what a device has to have.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

UNIT = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MEDIUM, MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
STEP = 2 * 2**20


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
    """`held`: bytes of the segments in use."""

    def __init__(self) -> None:
        self.held = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then by address
        self._end = 0  # of all segments

    def take(self, num_bytes: int) -> Block:
        """Allocate a block of at least `num_bytes`."""
        size = max(UNIT, -(-num_bytes // UNIT) * UNIT)
        small = size <= SMALL
        block = self._smallest(size, small) or self._segment(size, small)
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
                self._forget(other)
                _join(block, other)
        if block.is_segment:
            self.held -= block.size
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def give_back(self) -> None:
        """Release unused segments, like torch.cuda.empty_cache."""
        for free in self._free.values():
            free[:] = [entry for entry in free if not entry[2].is_segment]

    def _segment(self, size: int, small: bool) -> Block:
        """A new one, behind all others: addresses decide between free blocks of one size."""
        segment = Block(self._end, _segment_size(size), small)
        self._end += segment.size
        return segment

    def _smallest(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, size, key=lambda entry: entry[0])
        return free.pop(at)[2] if at < len(free) else None

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        bisect.insort(self._free[rest.small], (rest.size, rest.address, rest))

    def _forget(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2])]


def _segment_size(size: int) -> int:
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
