"""The weight beta of a KL in the reward: fixed, or steered towards a target.

    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

for a step of n trajectories (Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593,
section 2.2, with n / horizon for its gain of 0.1).
"""

from __future__ import annotations

import math
from typing import Protocol

LARGEST_ERROR = 0.2


class KLController(Protocol):
    """Something that holds a weight in `value` and moves it after each step."""

    value: float

    def update(self, current_kl: float, num_trajectories: int) -> None:
        """Take in the mean KL per token (nats) of a step of that many trajectories."""


class FixedKL:
    """A weight that stays at `coef` (at least 0)."""

    def __init__(self, coef: float) -> None:
        self.value = coef

    def update(self, current_kl: float, num_trajectories: int) -> None:
        """Changes nothing."""


class AdaptiveKL:
    """A weight from `coef` on that aims at a KL of `target` nats per token, at the pace of `horizon` trajectories."""

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.value = coef
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_trajectories: int) -> None:
        """Move the weight by at most a share 0.2 n / horizon, which has to be below 1.

        Raises ValueError for a KL that is not finite.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"adaptive KL: the step's mean KL is {current_kl}; look at its log-probs")
        error = min(max(current_kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1.0 + error * num_trajectories / self.horizon
