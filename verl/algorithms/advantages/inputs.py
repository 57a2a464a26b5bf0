"""What an advantage estimator reads, how it is set, and what it returns."""

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
