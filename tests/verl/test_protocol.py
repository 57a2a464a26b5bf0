"""The batch of trajectories, token by token; its columns are those of the table, and no other can be set."""

from __future__ import annotations

import copy
import pickle
import pkgutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.columns import COLUMNS
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


def test_the_sequences_of_a_rollout_are_rows_next_to_each_other() -> None:
    """A context begins a sequence, even without policy tokens after it; numbers of rollouts follow the batch."""
    prompt, turn = Segment(Source.PROMPT, (1, 2)), Segment(Source.POLICY, (7, 8), (-0.25, -1.0))
    further = [Segment(Source.CONTEXT, (1, 2, 7)), Segment(Source.POLICY, (4,), (-0.5,)), Segment(Source.CONTEXT, (5,))]
    cut, whole = trajectory("b", 1.0, prompt, turn, *further), trajectory("a", 0.5, prompt, turn)
    assert cut.sequences == [[prompt, turn], further[:2], further[2:]]
    assert (cut.num_tokens, cut.num_prompt_tokens, cut.num_response_tokens, cut.num_policy_tokens) == (9, 2, 3, 3)
    batch = TrainBatch.from_trajectories([whole, cut])
    assert (batch.lengths_B.tolist(), batch.rollout_B.tolist(), batch.num_rollouts) == ([4, 4, 4, 1], [0, 1, 1, 1], 2)
    assert batch.tokens["loss_mask"].int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert batch.rows["reward"].tolist() == [0.5, 1.0, 1.0, 1.0]
    assert batch.rows["group"].tolist() == [0, 1, 1, 1]
    assert batch.turn_of_token_T.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    part = batch.select([1, 2])
    assert (part.rollout_B.tolist(), part.rollout_of_token_T.tolist()) == ([0, 0], [0] * 8)
    assert batch.of_rollouts(batch.rows["reward"]).tolist() == [0.5, 1.0]


def turn_numbers(row: Trajectory) -> list[int]:
    """At the tokens of a policy segment its place among those with tokens; 0 at other tokens."""
    turns = [part for part in row.segments if part.source is Source.POLICY and part.ids]
    number_of = {id(part): number for number, part in enumerate(turns)}
    return [number_of.get(id(part), 0) for part in row.segments for _ in part.ids]


@given(rows=st.lists(trajectories(), max_size=4))
def test_a_batch_is_what_its_trajectories_say_token_by_token(rows: list[Trajectory]) -> None:
    batch = TrainBatch.from_trajectories(rows)
    expected = {
        "ids": torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
        "loss_mask": torch.tensor([flag for row in rows for flag in row.loss_mask], dtype=torch.bool),
        "rollout_log_probs": torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float32),
        "turn": torch.tensor([number for row in rows for number in turn_numbers(row)], dtype=torch.int32),
    }
    assert batch.tokens.keys() == expected.keys()
    for name, value_T in expected.items():
        assert batch.tokens[name].dtype == value_T.dtype
        assert torch.equal(batch.tokens[name], value_T), name
    assert batch.lengths_B.dtype == torch.int64
    sequences = [(number, one) for number, row in enumerate(rows) for one in row.sequences]
    assert batch.lengths_B.tolist() == [sum(len(part.ids) for part in one) for _, one in sequences]
    assert batch.rollout_B.tolist() == [number for number, _ in sequences]
    reward_R = torch.tensor([row.reward for row in rows], dtype=torch.float32)
    assert torch.equal(batch.rows["reward"], reward_R[batch.rollout_B])
    assert torch.equal(batch.of_rollouts(batch.rows["reward"]), reward_R)


@given(rows=st.lists(trajectories(), max_size=4))
def test_turns_are_the_runs_of_policy_tokens_of_a_rollout(rows: list[Trajectory]) -> None:
    """Those of a batch without numbers of turns."""
    turns = []
    for row in rows:
        number = -1
        for sequence in row.sequences:
            mask = [part.source is Source.POLICY for part in sequence for _ in part.ids]
            for place, trained in enumerate(mask):
                number += trained and not (place and mask[place - 1])
                turns.append(number if trained else 0)
    batch = TrainBatch.from_trajectories(rows)
    del batch.tokens["turn"]
    assert batch.turn_of_token_T.tolist() == turns


def test_turns_are_told_apart_whatever_lies_between_and_whatever_is_left_out() -> None:
    """Two turns without a reply between them are two, and a turn of which a token is left out is one."""
    row = trajectory(
        "a",
        0.0,
        Segment(Source.PROMPT, (1,)),
        Segment(Source.POLICY, (2, 3), (-1.0, -1.0)),
        Segment(Source.POLICY, (4, 5, 6), (-1.0, -1.0, -1.0)),
        Segment(Source.CONTEXT, (1,)),
        Segment(Source.POLICY, (7,), (-1.0,)),
    )
    batch = TrainBatch.from_trajectories([row])
    batch.tokens["loss_mask"][4] = False
    assert batch.turn_of_token_T.tolist() == [0, 0, 0, 1, 1, 1, 0, 2]
    assert batch.select([1]).turn_of_token_T.tolist() == [0, 2]


def test_an_id_that_no_integer_holds_is_an_error() -> None:
    with pytest.raises(OverflowError):
        flat_tokens([trajectory("a", 0.0, Segment(Source.PROMPT, (2**63,)))])


def batch() -> TrainBatch:
    """Two rows of 2 and 3 tokens."""
    tokens = {"ids": torch.arange(5), "loss_mask": torch.ones(5, dtype=torch.bool)}
    return TrainBatch(torch.tensor([2, 3]), tokens, {"reward": torch.zeros(2), "group": torch.arange(2)})


WRONG = [
    (
        "tokens",
        "advantages",
        torch.zeros(4),
        r"tokens\['advantages'\] is float32 \[4\]; it must be float32 .* of 5 tokens",
    ),
    ("tokens", "advantages", torch.zeros(5, 1), r"is float32 \[5, 1\]; it must be float32 with 1 dimensions"),
    ("tokens", "advantages", torch.zeros(5, dtype=torch.float64), r"is float64 \[5\]; it must be float32"),
    ("tokens", "keep", torch.zeros(5), r"tokens\['keep'\] is float32 \[5\]; it must be bool"),
    ("tokens", "top_index", torch.zeros(5, dtype=torch.int32), r"is int32 \[5\]; it must be int32 with 2 dimensions"),
    ("tokens", "advantage", torch.zeros(5), r"tokens\['advantage'\] is no column of a batch, those are ids, loss_mask"),
    ("tokens", "reward", torch.zeros(5), r"tokens\['reward'\] is no column"),
    ("rows", "reward", torch.zeros(5), r"rows\['reward'\] is float32 \[5\]; it must be float32 .* of 2 rows"),
    ("rows", "group", torch.zeros(2), r"rows\['group'\] is float32 \[2\]; it must be int64"),
]


@pytest.mark.parametrize(("kind", "name", "column", "message"), WRONG)
@pytest.mark.parametrize("way", ["set", "update", "or", "setdefault", "construct"])
def test_a_column_that_is_not_as_the_table_says_is_refused(
    way: str, kind: str, name: str, column: torch.Tensor, message: str
) -> None:
    made = batch()
    columns = getattr(made, kind)
    present = columns.pop(name, None)
    with pytest.raises(ValueError, match=message):
        match way:
            case "set":
                columns[name] = column
            case "update":
                columns.update({name: column})
            case "or":
                columns |= {name: column}
            case "setdefault":
                columns.setdefault(name, column)
            case "construct":
                replace(made, **{kind: columns | {name: column}})
    assert name not in columns
    if present is not None:
        columns[name] = present


def test_columns_as_the_table_says_are_set_and_go_through_copies() -> None:
    made = batch()
    made.tokens["advantages"] = torch.arange(5.0)
    made.tokens |= {"top_index": torch.zeros(5, 3, dtype=torch.int32)}
    assert made.tokens.setdefault("advantages", torch.zeros(5)).tolist() == [0, 1, 2, 3, 4]
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again.tokens.keys() == made.tokens.keys()
        assert all(torch.equal(again.tokens[name], column) for name, column in made.tokens.items())
        with pytest.raises(ValueError, match="is no column"):
            again.tokens["other"] = torch.zeros(5)
    assert made.select([1]).tokens["advantages"].tolist() == [2, 3, 4]


NAMES = {name for of in COLUMNS.values() for column in of.values() for name in (column.writer, *column.readers) if name}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_writers_and_readers_are_there(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_each_type_is_one_of_torch() -> None:
    assert all(isinstance(getattr(torch, c.dtype), torch.dtype) for of in COLUMNS.values() for c in of.values())
