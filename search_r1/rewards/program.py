"""The reward that the program of an episode returned (`agent.program`)."""

from __future__ import annotations

from typing import Any

from verl.protocol import Trajectory


class ProgramReward:
    """The number that the program returned, or had as `reward` in what it returned; 0 if it failed because of the
    policy."""

    scores_texts = False

    def score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        """Raises `ValueError` for a program that returned no reward."""
        returned = next((event["program"] for event in trajectory.events if "program" in event), None)
        if returned is None:
            return 0.0
        if "reward" not in returned:
            raise ValueError("the program returned no reward; return a number, or a dictionary with `reward`")
        return returned["reward"]
