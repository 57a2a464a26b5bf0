"""The reward that a program returned."""

from __future__ import annotations

import pytest

from search_r1.rewards.program import ProgramReward
from verl.errors import RewardError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.sampling.scoring import score_trajectories


def rollout(*events: dict[str, object]) -> Trajectory:
    segments = [Segment(Source.PROMPT, (1,)), *[Segment(Source.POLICY, (2,), (-1.0,)) for _ in events]]
    return Trajectory("g", Prompt((1,), "s", {}), segments, Status.ANSWERED, len(events), events=list(events))


def test_it_is_the_number_that_the_program_returned_whichever_turn_was_the_last() -> None:
    rollouts = [
        rollout({"turn": 0}, {"turn": 1, "program": {"reward": 0.25}}),
        rollout({"turn": 0, "program": {"reward": -1, "answer": "x"}}, {"turn": 1}),
        rollout({"turn": 0, "failure": "it crashed behind a bad turn"}),
    ]
    assert [one.reward for one in score_trajectories(ProgramReward(), rollouts, None)] == [0.25, -1.0, 0.0]


@pytest.mark.parametrize("returned", [{}, {"answer": "x"}, {"reward": "high"}])
def test_a_program_without_a_reward_is_told(returned: dict[str, object]) -> None:
    with pytest.raises(RewardError, match="ProgramReward.*(returned no reward|gave 'high')"):
        score_trajectories(ProgramReward(), [rollout({"turn": 0, "program": returned})], None)
