"""How the losses of tokens become the loss of a mini-batch: a weight per token, so that loss = sum_t weight_t loss_t.

With n_i policy tokens in row i (a rollout, all of its sequences together), N = sum_i n_i, and R rows that have any, a
policy token of row i weighs

    "token-mean":              1 / N           DAPO, arXiv 2503.14476
    "seq-mean-token-mean":     1 / (R n_i)     GRPO, arXiv 2402.03300
    "seq-mean-token-sum":      1 / R           REINFORCE on whole rows
    "seq-mean-token-sum-norm": 1 / (R C)       Dr. GRPO, arXiv 2503.20783; C is a constant number of tokens

and every other token 0. Rows without policy tokens count in no mean. The weights belong to the whole mini-batch:
however its rows are cut into micro-batches, the sums over the parts add up to the same loss.
"""

from __future__ import annotations

import torch

LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def unit_sums(value_T: torch.Tensor, unit_T: torch.Tensor, num_units: int) -> torch.Tensor:
    """Sum of `value_T` [T] over the tokens of each unit, [num_units]; `unit_T` [T] int64 in 0 .. num_units - 1."""
    return value_T.new_zeros(num_units).index_add(0, unit_T, value_T)


def loss_weights(
    mask_T: torch.Tensor, row_T: torch.Tensor, num_rows: int, mode: str, constant: float | None = None
) -> torch.Tensor:
    """Weight of each token's loss [T] float32, for all tokens of a mini-batch of `num_rows` rows.

    `mask_T` [T] bool marks policy tokens, `row_T` [T] int64 is the row of each token. `constant` (tokens, > 0) is read
    by "seq-mean-token-sum-norm" only. Raises ValueError for an unknown mode and a constant that is missing or not > 0.
    """
    # A row without policy tokens does not count in a mean over rows. The clamps only avoid a division by 0.
    num_B = unit_sums(mask_T.double(), row_T, num_rows)
    num_used_rows = (num_B > 0).sum().clamp(min=1)
    match mode:
        case "token-mean":
            divisor = num_B.sum().clamp(min=1)
        case "seq-mean-token-mean":
            divisor = num_used_rows * num_B[row_T].clamp(min=1)
        case "seq-mean-token-sum":
            divisor = num_used_rows
        case "seq-mean-token-sum-norm":
            divisor = num_used_rows * _required(constant)
        case _:
            raise ValueError(f"unknown loss aggregation '{mode}'; known: {', '.join(LOSS_AGGREGATIONS)}")
    return (mask_T.double() / divisor).float()


def _required(constant: float | None) -> float:
    if constant is None or constant <= 0:
        raise ValueError(
            f"loss aggregation 'seq-mean-token-sum-norm' needs a constant length in tokens (> 0), got {constant}"
        )
    return constant
