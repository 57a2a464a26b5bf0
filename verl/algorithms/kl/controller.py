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
        self.value = _not_negative(coef)

    def update(self, current_kl: float, num_trajectories: int) -> None:
        """Changes nothing."""


class AdaptiveKL:
    """A weight from `coef` on that aims at a KL of `target` nats per token, at the pace of `horizon` trajectories."""

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL: target is {target} and horizon {horizon}; both must be above 0")
        self.coef = self.value = _not_negative(coef)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_trajectories: int) -> None:
        """Move the weight by at most a share 0.2 n / horizon.

        Raises ValueError for a KL that is not finite, and for a step so long that the weight could reach zero.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"adaptive KL: the step's mean KL is {current_kl}; look at its log-probs")
        pace = num_trajectories / self.horizon
        if pace * LARGEST_ERROR >= 1:
            raise ValueError(
                f"adaptive KL: {num_trajectories} trajectories a step with a horizon of {self.horizon} can turn the "
                f"weight to zero or below; set the horizon above {LARGEST_ERROR * num_trajectories:g}"
            )
        error = min(max(current_kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= 1.0 + error * pace


def _not_negative(coef: float) -> float:
    if coef < 0:
        raise ValueError(f"KL weight: the coefficient is {coef}; it must be at least 0")
    return coef
