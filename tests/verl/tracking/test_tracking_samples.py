"""Which trajectories the trackers show, and what of them."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config.sections.trainer import TrainerConfig
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.backend import Sample
from verl.tracking.tracker import samples_to_show


def sampled(group: str, place: int, row: dict[str, Any] | None = None) -> Trajectory:
    """Its policy writes the token 100 + `place`."""
    segments = [
        Segment(Source.PROMPT, (1, 2)),
        Segment(Source.POLICY, (100 + place,), (-0.5,)),
        Segment(Source.ENVIRONMENT, (7,)),
    ]
    prompt = Prompt((1, 2), "nq", row or {})
    return Trajectory(
        group, prompt, segments, Status.ANSWERED, num_searches=1, reward=0.5, reward_components={"em": 1.0}
    )


def decode(ids: Any) -> str:
    return "".join(f"[{number}]" for number in ids)


STEP = [sampled("a", 0), sampled("a", 1), sampled("a", 2), sampled("b", 3), sampled("b", 4)]


@pytest.mark.parametrize(
    ("number", "step", "shown"),
    [
        (2, 10, [100, 103]),
        (4, 10, [100, 103, 101, 104]),
        (99, 20, [100, 103, 101, 104, 102]),
        (2, 1, [100, 103]),
        (2, 9, []),
        (0, 10, []),
    ],
)
def test_the_first_of_each_prompt_come_first(number: int, step: int, shown: list[int]) -> None:
    trainer = TrainerConfig(log_trajectories=number, log_trajectories_freq=10)
    assert [one.response for one in samples_to_show(trainer, STEP, step, decode)] == [f"[{n}][7]" for n in shown]


def test_what_a_sample_says() -> None:
    row = {"extra_info": {"question": "Which river?"}, "reward_model": {"ground_truth": {"target": ["Loire"]}}}
    trainer = TrainerConfig(log_trajectories=1)
    [known] = samples_to_show(trainer, [sampled("a", 0, row)], 1, decode)
    assert known == Sample(
        "nq", "Which river?", '{"target": ["Loire"]}', "[100][7]", "answered", 1, 0.5, {"em": 1.0}
    )  # fmt: skip
    [bare] = samples_to_show(trainer, [sampled("a", 0)], 1, decode)
    assert (bare.question, bare.gold) == ("[1][2]", "null")


def test_the_context_of_a_further_sequence_is_no_response() -> None:
    cut = sampled("a", 0)
    cut.segments += [Segment(Source.CONTEXT, (1, 2, 100, 7)), Segment(Source.POLICY, (104,), (-0.5,))]
    [shown] = samples_to_show(TrainerConfig(log_trajectories=1), [cut], 1, decode)
    assert shown.response == "[100][7][104]"
