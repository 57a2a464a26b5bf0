"""Independent pieces of work side by side on a CPU: one thread for each piece, none inside its operations.

The operations of a small model are too short to share out: waking a second thread for each costs what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Lanes:
    """`number` threads. A single piece runs in the caller's thread, whose operations may use all cores."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool = ThreadPoolExecutor(number, "lane", torch.set_num_threads, (1,)) if number > 1 else None

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """The results in the order of `pieces`; begun in this order, so the longest should come first."""
        if self._pool is None or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        return list(self._pool.map(work, pieces))
