"""Bytes of live tensors: now, and at the peak since `restart`.

`held` and `peak_held` are the same with what PyTorch's CUDA allocator holds around it (`segments`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from verl.planning.dry_run.segments import Block, Segments


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors, and bytes that the allocator holds for them."""

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
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            self._take(key, storage.nbytes())

    def hide(self, storage: torch.UntypedStorage) -> None:
        """Do not count a storage, which is host memory."""
        key = storage._cdata
        self._watched[key] = weakref.ref(storage, partial(self._gone, key))
        self._take(key, 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 frees and takes memory by changing the size of a storage."""
        if storage._cdata in self._watched:
            self._give(storage._cdata)
            self._take(storage._cdata, storage.nbytes())

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
