"""What the two stand-ins for a scorer have in common."""

from __future__ import annotations

from collections.abc import Sequence

from verl.protocol import Trajectory


class ContentScorer:
    """Has always enough."""

    stats = {"reward/unavailable_ratio": 0.0}

    def begin(self, carried: Sequence[Trajectory] = ()) -> None:
        pass

    def score_ahead(self, trajectories: Sequence[Trajectory]) -> None:
        pass

    def can_score_now(self, trajectories: Sequence[Trajectory]) -> bool:
        return True

    def require_enough_so_far(self, least: int) -> None:
        pass

    def require_enough(self, trajectories: Sequence[Trajectory]) -> None:
        pass
