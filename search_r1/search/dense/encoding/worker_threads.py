"""A thread pool for independent batches on a CPU: one thread per batch, none inside its operations.

The operations of a small model are too short to parallelise: waking a second thread costs as much as it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class WorkerThreads:
    """`number` threads. A single batch runs in the caller's thread, whose operations may use all cores."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool = ThreadPoolExecutor(number, "encoder", torch.set_num_threads, (1,)) if number > 1 else None

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """The results in the order of `pieces`, which are started in this order, so put the longest first."""
        if self._pool is None or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        return list(self._pool.map(work, pieces))
