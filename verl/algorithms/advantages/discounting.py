"""Discounted sums over what follows within a row."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sum(value_N: Tensor, row_N: Tensor, factor: float) -> Tensor:
    """[N]: S_t = sum_{k>=0} factor^k x_{t+k} over the entries of t's row; `row_N` int64 never decreases.

    By doubling: if S covers the next s entries, then S_t + factor^s S_{t+s} covers 2 s. It takes log2(longest row)
    steps over all rows at once.
    """
    total_N, stride = value_N, 1
    while stride < len(total_N):
        same_row_N = row_N[stride:] == row_N[:-stride]
        if not same_row_N.any():
            break
        later_N = torch.where(same_row_N, factor**stride * total_N[stride:], 0.0)
        total_N = torch.cat([total_N[:-stride] + later_N, total_N[-stride:]])
        stride *= 2
    return total_N


def following(value_N: Tensor, row_N: Tensor) -> Tensor:
    """[N]: the value at the next entry of the same row, 0 at a row's last."""
    next_N = torch.where(row_N[1:] == row_N[:-1], value_N[1:], 0.0)
    return torch.cat([next_N, value_N.new_zeros(min(1, len(value_N)))])
