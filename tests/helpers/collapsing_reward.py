"""A reward under which some versions of the weights have collapsed."""

from __future__ import annotations

from typing import Any

from verl.protocol import Trajectory


class CollapsingReward:
    """0 for what a version in `collapsed` has sampled; else 1, or 0.5 where an odd number of tokens was sampled."""

    def __init__(self, collapsed: list[int]) -> None:
        self.collapsed = frozenset(collapsed)

    def score(self, trajectory: Trajectory, tokenizer: Any) -> float:
        if trajectory.weight_version in self.collapsed:
            return 0.0
        return 0.5 if trajectory.num_policy_tokens % 2 else 1.0
