"""The batch of trajectories, by hand and against the definition token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import Prompt, Segment, Source, TrainBatch, Trajectory, flat_tokens

IDS = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
LOG_PROB = st.floats(-1e30, 0)  # of 64 bits: the batch rounds them


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    source, ids = draw(st.sampled_from(list(Source))), draw(IDS)
    if source is not Source.POLICY:
        return Segment(source, ids)
    return Segment(source, ids, tuple(draw(st.lists(LOG_PROB, min_size=len(ids), max_size=len(ids)))))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    group, parts = draw(st.sampled_from("abc")), draw(st.lists(segments(), max_size=4))
    return Trajectory(group, Prompt((), "nq", {}), parts, reward=draw(st.floats(-1, 1)))


def trajectory(group: str, reward: float, *parts: Segment) -> Trajectory:
    return Trajectory(group, Prompt((), "nq", {}), list(parts), reward=reward)


def test_a_batch_by_hand() -> None:
    searched = trajectory(
        "b",
        1.0,
        Segment(Source.PROMPT, (1, 2)),
        Segment(Source.POLICY, (7, 8), (-0.25, -1.0)),
        Segment(Source.ENVIRONMENT, (9,)),
        Segment(Source.POLICY, (7,), (-0.5,)),
    )
    answered = trajectory("a", 0.5, Segment(Source.PROMPT, (3,)), Segment(Source.POLICY, (4,), (-2.0,)))
    batch = TrainBatch.from_trajectories([searched, answered, searched])
    assert batch.lengths_B.tolist() == [6, 2, 6]
    assert batch.tokens["ids"].tolist() == [1, 2, 7, 8, 9, 7, 3, 4, 1, 2, 7, 8, 9, 7]
    assert batch.tokens["loss_mask"].int().tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    assert batch.tokens["rollout_log_probs"].tolist() == [0, 0, -0.25, -1, 0, -0.5, 0, -2, 0, 0, -0.25, -1, 0, -0.5]
    assert batch.rows["group"].tolist() == [0, 1, 0]
    assert batch.rows["reward"].tolist() == [1.0, 0.5, 1.0]


@given(rows=st.lists(trajectories(), max_size=4))
def test_a_batch_is_what_its_trajectories_say_token_by_token(rows: list[Trajectory]) -> None:
    batch = TrainBatch.from_trajectories(rows)
    expected = {
        "ids": torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
        "loss_mask": torch.tensor([flag for row in rows for flag in row.loss_mask], dtype=torch.bool),
        "rollout_log_probs": torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float32),
    }
    assert batch.tokens.keys() == expected.keys()
    for name, value_T in expected.items():
        assert batch.tokens[name].dtype == value_T.dtype
        assert torch.equal(batch.tokens[name], value_T), name
    assert batch.lengths_B.dtype == torch.int64
    assert batch.lengths_B.tolist() == [len(row.ids) for row in rows]
    assert batch.rows["reward"].tolist() == torch.tensor([row.reward for row in rows], dtype=torch.float32).tolist()


@given(rows=st.lists(trajectories(), max_size=4))
def test_turns_are_the_runs_of_policy_tokens_of_a_row(rows: list[Trajectory]) -> None:
    turns = []
    for row in rows:
        mask, number = row.loss_mask, -1
        for place, trained in enumerate(mask):
            number += trained and not (place and mask[place - 1])
            turns.append(number if trained else 0)
    assert TrainBatch.from_trajectories(rows).turn_of_token_T.tolist() == turns


def test_an_id_that_no_integer_holds_is_an_error() -> None:
    with pytest.raises(OverflowError):
        flat_tokens([trajectory("a", 0.0, Segment(Source.PROMPT, (2**63,)))])
