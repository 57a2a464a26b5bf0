"""float32 weights to bfloat16 with their checksum: one compiled pass over memory, where PyTorch takes three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

VALUES = 2048  # in a block of `checksum.BLOCK` bytes
WORDS = VALUES // 4
LARGEST = 0x7F7F_7FFF  # bits of the largest float32 that bfloat16 rounds to a finite value


def round_to_bfloat16(values: torch.Tensor, target: torch.Tensor, first_block: int) -> tuple[int, bool]:
    """Round `values` to the nearest, ties to even, as `Tensor.copy_` does.

    values: float32 [N], target: bfloat16 [N], both contiguous and on the CPU, N a multiple of 2048. first_block: the
    number of the first block of `target` in its weight. Returns the blocks' share of `checksum.word_sum`, below
    2^64, and whether all of `target` is finite; if not, it holds no meaningful values.
    """
    source, rounded = values.view(torch.int32).numpy(), target.view(torch.int16).numpy()
    words = target.view(torch.int64).numpy()
    total, largest = _round(source.view(np.uint32), rounded.view(np.uint16), words.view(np.uint64), first_block)
    return int(total), bool(largest <= LARGEST)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The machine code is kept for other processes, unless no folder can be written to."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither __pycache__, the user's cache nor NUMBA_CACHE_DIR is writable
        return njit(nogil=True)(function)


@_compiled
def _round(values: np.ndarray, target: np.ndarray, words: np.ndarray, first_block: int) -> tuple[np.uint64, np.uint32]:
    """Block by block, so that the sum reads from the cache. All numbers are unsigned and wrap around.

    A block is a slice of its own: indices that have a variable in them keep the loops from being vectorised.
    """
    total, largest = np.uint64(0), np.uint32(0)
    for block in range(len(words) // WORDS):
        source = values[block * VALUES : block * VALUES + VALUES]
        rounded = target[block * VALUES : block * VALUES + VALUES]
        for i in range(VALUES):
            # Without its sign, a number's bits grow with it, and those of Inf and NaN are the largest of all.
            # Half of the last place is added, and what does not fit is cut off.
            bits = source[i]
            largest = max(largest, bits & np.uint32(0x7FFF_FFFF))
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # a tie goes up from an odd value only
            rounded[i] = np.uint16((bits + half) >> np.uint32(16))
        # The rounded values again, as 64-bit words; the cache still has them.
        own, of_block = words[block * WORDS : block * WORDS + WORDS], np.uint64(0)
        for i in range(WORDS):
            of_block += own[i]
        total += of_block * np.uint64(2 * (first_block + block) + 1)
    return total, largest
