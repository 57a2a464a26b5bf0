"""What an advantage estimator reads, how it is set, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from verl.algorithms.registry import Registry
from verl.algorithms.traits import ESTIMATOR_TRAITS

EPSILON = 1e-6
Scale = Literal["group_std", "none", "batch_std"]


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator may read. Policy tokens are the true positions of `mask_T`.

    Raises ValueError for rows, groups or masks that contradict each other; `TrainBatch` has checked lengths and types.
    """

    reward_T: Tensor
    """[T] float: token rewards (a row's score at its last policy token, minus any KL). Not read outside `mask_T`."""
    mask_T: Tensor
    """[T] bool: true at policy tokens."""
    row_T: Tensor
    """[T] int64: row of each token, from 0, never decreasing."""
    group_B: Tensor
    """[B] int64: group number of each row, from 0; a group holds the rows of one prompt."""
    value_T: Tensor | None = None
    """[T] float: the critic's value of the state before each token. Read by gae."""
    baseline_B: Tensor | None = None
    """[B] float: reward of the greedy answer to the row's prompt. Read by remax."""
    chain_T: Tensor | None = None
    """[T] bool: tokens that GAE's recursion visits, `mask_T` among them; None: `mask_T`. Read by gae."""

    def __post_init__(self) -> None:
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
    """What can be set; an estimator ignores what its formula does not name. `verl.config` checks the values."""

    gamma: float = 1.0
    """Discount per policy token, 0 to 1. Read by gae and reinforce_plus_plus."""
    lam: float = 1.0
    """GAE's lambda, 0 to 1. Read by gae."""
    scale: Scale = "group_std"
    """What centred rewards are divided by: "group_std", "none" or "batch_std". Read by grpo and reinforce."""


class Advantages(NamedTuple):
    """What an estimator returns; tokens have the reward's dtype."""

    advantage_T: Tensor
    """[T]: 0 outside `mask_T` (gae with a chain: outside `chain_T`)."""
    return_T: Tensor | None = None
    """[T], 0 outside the same tokens: rewards to come (gae: the critic's target). None: the estimator works on rows."""
    batch_std: Tensor | None = None
    """Scalar float64: the deviation of the scale "batch_std"; `scaling.batch_divisor` says what it divided by."""


ADVANTAGES: Registry[Callable[[AdvantageInput, AdvantageSettings], Advantages]] = Registry(
    "advantage estimator", declared=ESTIMATOR_TRAITS
)
