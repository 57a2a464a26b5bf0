"""Which trajectories of a step the experiment trackers show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest

from verl.config.sections.trainer import TrainerConfig
from verl.protocol import Source, Trajectory
from verl.tracking.backend import Sample


def samples_to_show(
    trainer: TrainerConfig, trajectories: Sequence[Trajectory], step: int, decode: Callable[[Sequence[int]], str]
) -> list[Sample]:
    """At most `log_trajectories` trajectories of step 1 and of every `log_trajectories_freq`-th step, else none.

    The first of each group, in the order they were sampled, then the second of each, and so on.
    """
    if step != 1 and step % trainer.log_trajectories_freq:
        return []
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    in_turn = (one for round_ in zip_longest(*groups.values()) for one in round_ if one is not None)
    return [_sample(one, decode) for one, _ in zip(in_turn, range(trainer.log_trajectories), strict=False)]


def _sample(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> Sample:
    row, segments = trajectory.prompt.row, trajectory.segments
    question = row.get("question") or (row.get("extra_info") or {}).get("question") or decode(trajectory.prompt.ids)
    gold = (row.get("reward_model") or {}).get("ground_truth")
    return Sample(
        data_source=trajectory.prompt.data_source,
        question=str(question),
        gold=json.dumps(gold, ensure_ascii=False, default=str),
        response="".join(decode(segment.ids) for segment in segments if segment.source is not Source.PROMPT),
        status=str(trajectory.status),
        searches=trajectory.num_searches,
        reward=trajectory.reward,
        components=dict(trajectory.reward_components),
    )
