"""Staleness: how many versions older the weights that sampled a step are than those that are trained on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verl.errors import WeightSyncError
from verl.protocol import Trajectory


def staleness_metrics(trajectories: Sequence[Trajectory], step: int, most: int) -> dict[str, float]:
    """`rollout/staleness/{mean,max}` in versions, over tokens: step n trains version n - 1, so one of n - 2 has 1.

    Where a trajectory was sampled by several versions, the mean is over its tokens, and the bound holds for each.
    Raises WeightSyncError where a staleness is below 0 or above `most`.
    """
    found = Counter[int]()  # tokens by staleness
    wrong = []
    for trajectory in trajectories:
        own = Counter[int]()
        for version, number in trajectory.weight_versions:
            own[step - 1 - version] += number
        wrong += [staleness for staleness in own if not 0 <= staleness <= most][:1]
        found += own
    if wrong:
        raise WeightSyncError(
            f"step {step}: {len(wrong)} of {len(trajectories)} trajectories were sampled by version "
            f"{step - 1 - wrong[0]} of the weights, but only versions {step - 1 - most} to {step - 1} may be "
            "trained on (trainer.max_staleness)"
        )
    mean = sum(staleness * number for staleness, number in found.items()) / max(1, found.total())
    return {"rollout/staleness/mean": mean, "rollout/staleness/max": float(max(found, default=0))}
