"""How much older the weights are that sampled a step than those that are trained on it."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import WeightSyncError
from verl.protocol import Trajectory


def staleness_metrics(trajectories: Sequence[Trajectory], step: int, most: int) -> dict[str, float]:
    """`rollout/staleness/{mean,max}` in versions: step n trains version n - 1, so one sampled by n - 2 has 1.

    Raises WeightSyncError where it is below 0 or above `most`.
    """
    found = [step - 1 - trajectory.weight_version for trajectory in trajectories]
    if wrong := [number for number in found if not 0 <= number <= most]:
        raise WeightSyncError(
            f"step {step}: {len(wrong)} of {len(found)} trajectories were sampled by version {step - 1 - wrong[0]} of "
            f"the weights, and only {step - 1 - most} to {step - 1} may be trained (trainer.max_staleness)"
        )
    return {"rollout/staleness/mean": sum(found) / len(found), "rollout/staleness/max": float(max(found))}
