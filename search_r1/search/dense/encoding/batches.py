"""Batches of texts of similar length, for little padding, and the threads that compute batches on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

_CPU_TOKENS, _GPU_TOKENS = 2048, 65_536
_CPU_OVERHEAD, _GPU_OVERHEAD = 64, 2048
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def batch_cost(device: torch.device) -> tuple[int, int]:
    """The best number of tokens for a forward pass on `device`, and the fixed cost of a pass, in tokens."""
    return (_GPU_TOKENS, _GPU_OVERHEAD) if device.type == "cuda" else (_CPU_TOKENS, _CPU_OVERHEAD)


def length_batches(
    lengths: list[int], max_tokens: int, overhead_tokens: int = 0, max_texts: int = sys.maxsize
) -> list[list[int]]:
    """Indices of `lengths`, shortest first, in the cheapest batches of at most `max_texts`.

    A batch costs its padded tokens plus `overhead_tokens`; it has at most `max_tokens` (a longer text is alone).
    """
    # Dynamic programming: for each number of shortest texts the cheapest batches, by the size of the last one.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs = np.zeros(len(order) + 1, dtype=np.int64)  # of the cheapest batches of the first texts
    starts = [0] * len(costs)  # where the last of these batches begins
    for end in range(1, len(costs)):
        length = lengths[order[end - 1]]
        sizes = np.arange(min(end, max_texts, max(1, max_tokens // length)), 0, -1)
        totals = costs[end - len(sizes) : end] + sizes * length
        best = int(totals.argmin())
        costs[end] = totals[best] + overhead_tokens
        starts[end] = end - int(sizes[best])
    # Read the batches off, from the last to the first.
    batches, end = [], len(order)
    while end:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


# One thread per batch, none inside its operations. The operations of a small model are too short to parallelise: waking
# a second thread costs as much as it saves.


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
