"""What an advantage estimator reads, how it is set, what it returns, and what estimators share: from rewards of tokens
to one of a row and back, sums and divisors over the rows of a group, whitening, discounted sums within a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.registry import Registry
from verl.algorithms.traits import ESTIMATOR_TRAITS

EPSILON = 1e-6
SCALES = ("group_std", "none", "batch_std")


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator may read. Policy tokens are the true positions of `mask_T`.

    Raises ValueError for lengths or types that do not fit together.
    """

    reward_T: Tensor
    """[T] float: token rewards (a row's score at its last policy token, minus any KL). Not read outside `mask_T`."""
    mask_T: Tensor
    """[T] bool: true at policy tokens."""
    row_T: Tensor
    """[T] int64: row (rollout) of each token, from 0, never decreasing. A row may have several sequences."""
    group_B: Tensor
    """[B] int64: group number of each row, from 0; a group holds the rows of one prompt."""
    value_T: Tensor | None = None
    """[T] float: the critic's value of the state before each token. Read by gae."""
    baseline_B: Tensor | None = None
    """[B] float: reward of the greedy answer to the row's prompt. Read by remax."""
    chain_T: Tensor | None = None
    """[T] bool: tokens that GAE's recursion visits, `mask_T` among them; None: `mask_T`. Read by gae."""
    turn_T: Tensor | None = None
    """[T] int64: the turn of each policy token, never decreasing in a row; None: a row is one turn. For grpo_turns."""

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_types()
        self._check_numbers()

    def _check_shapes(self) -> None:
        shape_of = {"T": self.reward_T.shape, "B": self.group_B.shape}
        for name, tensor in vars(self).items():
            letter = name[-1]
            if tensor is not None and (tensor.ndim != 1 or tensor.shape != shape_of[letter]):
                like = "reward_T" if letter == "T" else "group_B"
                shapes = f"{name} has shape {tuple(tensor.shape)}, {like} {tuple(shape_of[letter])}"
                raise ValueError(f"{shapes}: give both the same [{letter}]")

    def _check_types(self) -> None:
        for name in ("reward_T", "value_T", "baseline_B"):
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"{name} is {tensor.dtype}: give it as floats")
        for name in ("mask_T", "chain_T"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.bool:
                raise ValueError(f"{name} is {tensor.dtype}: give a bool mask")
        for name in ("row_T", "group_B", "turn_T"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.int64:
                raise ValueError(f"{name} is {tensor.dtype}: give int64 numbers")

    def _check_numbers(self) -> None:
        if (self.row_T.diff() < 0).any():
            raise ValueError("row_T decreases: store the tokens of all rows one after the other, rows in order")
        if ((self.row_T < 0) | (self.row_T >= len(self.group_B))).any():
            raise ValueError(f"row_T names a row outside 0..{len(self.group_B) - 1}: group_B has one entry a row")
        if (self.group_B < 0).any():
            raise ValueError("group_B has a negative number: number the groups from 0")
        if self.chain_T is not None and (self.mask_T & ~self.chain_T).any():
            raise ValueError("chain_T leaves out a policy token: every true position of mask_T must be true there too")


@dataclass(frozen=True)
class AdvantageSettings:
    """The settings of all estimators; each reads only what its formula names. ValueError for values out of range."""

    gamma: float = 1.0
    """Discount per policy token, 0 to 1. Read by gae and reinforce_plus_plus."""
    lam: float = 1.0
    """GAE's lambda, 0 to 1. Read by gae."""
    scale: str = "group_std"
    """The divisor of centred rewards: "group_std", "none" or "batch_std". Read by grpo and reinforce; grpo_turns reads
    "batch_std"."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from 0 to 1")
        if self.scale not in SCALES:
            raise ValueError(f"unknown advantage scale '{self.scale}'; known: {', '.join(SCALES)}")


class Advantages(NamedTuple):
    """What an estimator returns; tokens have the reward's dtype."""

    advantage_T: Tensor
    """[T]: 0 outside `mask_T` (gae with a chain: outside `chain_T`)."""
    return_T: Tensor | None = None
    """[T], 0 outside the same tokens: rewards to come (gae: the critic's target). None: the estimator works on rows."""
    batch_std: Tensor | None = None
    """Scalar float64: the deviation of the scale "batch_std"; `batch_divisor` says what it divided by."""


ADVANTAGES: Registry[Callable[[AdvantageInput, AdvantageSettings], Advantages]] = Registry(
    "advantage estimator", declared=ESTIMATOR_TRAITS
)


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: for each row, the sum of `value_B` over its group, itself included."""
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    return value_B.new_zeros(num_groups).index_add(0, group_B, value_B)[group_B]


def group_size(value_B: Tensor, group_B: Tensor) -> Tensor:
    """[B] in the dtype of `value_B`: how many rows the group of each row has, itself included."""
    return group_sum(torch.ones_like(value_B), group_B)


def centred(reward_B: Tensor, group_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """[B]: R_i minus its group's (weighted) mean.

    Equal rewards give exactly 0: the mean is taken of what is above the group's lowest reward, which is then 0.
    """
    weight_B = torch.ones_like(reward_B) if weight_B is None else weight_B
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    lowest_G = reward_B.new_zeros(num_groups).scatter_reduce(0, group_B, reward_B, "amin", include_self=False)
    above_B = reward_B - lowest_G[group_B]
    return above_B - group_sum(weight_B * above_B, group_B) / group_sum(weight_B, group_B)


class PolicyRows(NamedTuple):
    """The rows that take part in a comparison, renumbered from 0; each has policy tokens."""

    reward_B: Tensor
    """[B] float64: R_i, the sum of the row's token rewards over its policy tokens."""
    length_B: Tensor
    """[B] float64: number of policy tokens, at least 1."""
    group_B: Tensor
    """[B] int64."""
    row_N: Tensor
    """[N] int64: row (in the new numbers) of each of their policy tokens."""
    mask_T: Tensor
    """[T] bool: where those tokens are in the batch."""


def policy_rows(inputs: AdvantageInput) -> PolicyRows:
    """Sum `inputs.reward_T` over the policy tokens of each row that has any.

    In float64: what a mean of float32 rewards loses to rounding would be divided by a std that is no larger.
    """
    return _rows(inputs, inputs.mask_T)


def compared_rows(inputs: AdvantageInput) -> PolicyRows:
    """`policy_rows` without those that are alone in their group, since the others failed or have no policy tokens.

    They have nothing to compare with. Their own reward as advantage would make a gradient of the others' failure.
    """
    rows = policy_rows(inputs)
    compared_B = group_size(rows.reward_B, rows.group_B) > 1
    if bool(compared_B.all()):
        return rows
    return _rows(inputs, inputs.mask_T.masked_scatter(inputs.mask_T, compared_B[rows.row_N]))


def _rows(inputs: AdvantageInput, mask_T: Tensor) -> PolicyRows:
    reward_N = inputs.reward_T[mask_T].double()
    row_B, row_N, length_B = torch.unique_consecutive(inputs.row_T[mask_T], return_inverse=True, return_counts=True)
    reward_B = reward_N.new_zeros(len(row_B)).index_add(0, row_N, reward_N)
    return PolicyRows(reward_B, length_B.to(reward_B.dtype), inputs.group_B[row_B], row_N, mask_T)


def scattered(value_N: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: `value_N` at the true positions of `mask_T`, 0 elsewhere."""
    return value_N.new_zeros(len(mask_T)).masked_scatter(mask_T, value_N)


def spread(value_B: Tensor, rows: PolicyRows, inputs: AdvantageInput) -> Tensor:
    """[T] in the reward's dtype: each row's value at all its policy tokens, 0 elsewhere."""
    return scattered(value_B.to(inputs.reward_T.dtype)[rows.row_N], rows.mask_T)


WHITENING_EPSILON = 1e-8  # as veRL has it, inside the square root


def over_group_std(centred_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: c_i / (sigma_g + 1e-6), sigma_g the unbiased std of the group, which has two rows or more."""
    variance_B = group_sum(centred_B.square(), group_B) / (group_size(centred_B, group_B) - 1)
    return centred_B / (variance_B.sqrt() + EPSILON)


def over_batch_std(centred_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B] and scalar: c_i / `batch_divisor(s)` and s, the unbiased std over all rows.

    Without a row s is 0. Raises ValueError for a single one.
    """
    if len(centred_B) == 0:
        return centred_B, centred_B.new_zeros(())
    if len(centred_B) < 2:
        raise ValueError(
            f"the std over a batch needs at least two trajectories with policy tokens, not {len(centred_B)}: "
            'take more of them, or the scale "none"'
        )
    batch_std = centred_B.std()
    return centred_B / batch_divisor(batch_std), batch_std


def batch_divisor(batch_std: Tensor) -> Tensor:
    """The divisor of a batch's advantages, and of its KL loss, for their std s = `batch_std`: s + 1e-6, or 1 if s is 0.

    Without a deviation there is no scale to take out: the advantages are 0 whatever divides them, and the KL would be
    multiplied by a million.
    """
    return torch.where(batch_std > 0, batch_std + EPSILON, 1.0)


def whitened(value_N: Tensor) -> Tensor:
    """[N]: (x - mean) / sqrt(var + 1e-8), var unbiased; a single value becomes 0, and so do equal ones, exactly."""
    if len(value_N) < 2:
        return torch.zeros_like(value_N)
    above_N = value_N.double() - value_N.min()
    return ((above_N - above_N.mean()) * (above_N.var() + WHITENING_EPSILON).rsqrt()).to(value_N.dtype)


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
