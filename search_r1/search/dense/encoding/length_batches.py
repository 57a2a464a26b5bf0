"""Batches of texts of similar length, for little padding."""

from __future__ import annotations

import sys

import numpy as np
import torch

_CPU_TOKENS, _GPU_TOKENS = 2048, 65_536
_CPU_OVERHEAD, _GPU_OVERHEAD = 64, 2048


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
