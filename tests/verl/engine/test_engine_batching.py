"""How batches are cut into mini-batches and micro-batches, of which rows, and put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import CPU, make_batch, make_engine, relative_error
from engine_state import full_state
from hypothesis import given
from hypothesis import strategies as st

from verl.engine.batching import Layout, merge_rows, model_input, selected_tokens, trained_rollouts
from verl.engine.micro_batches import Budget, mini_batches, plan, plan_all, split_rows
from verl.protocol import TrainBatch

PADDED, PACKED = Layout(packed=False), Layout(packed=True)


def test_rows_are_split_into_parts_of_about_as_many_tokens() -> None:
    # longest first: 9 -> rank 0, 7 -> rank 1, 5 -> rank 1 (7 < 9), 4 -> rank 0 (9 < 12), 2 -> rank 1 (12 < 13)
    assert split_rows(torch.tensor([4, 9, 2, 7, 5]), 2) == [[0, 1], [2, 3, 4]]
    assert split_rows(torch.tensor([3]), 2) == [[0], []]


def test_padded_rows_of_like_length_go_together_and_padding_counts() -> None:
    lengths_B = torch.tensor([3, 10, 4, 9, 30])
    # 30 alone (over the budget); 10 and 9 padded to 10: 20; 4 and 3 padded to 4: 8
    assert plan(lengths_B, 1, 0, Budget(tokens=20), PADDED) == [[4], [1, 3], [2, 0]]
    assert plan(lengths_B, 1, 0, Budget(rows=2), PADDED) == [[4, 1], [3, 2], [0]]
    # two ranks side by side: 30 beside 10, then room for two of at most 9 each
    assert plan(lengths_B, 2, 0, Budget(tokens=20), PADDED) == [[4], [3, 0]]
    assert plan(lengths_B, 2, 1, Budget(tokens=20), PADDED) == [[1], [2]]
    with pytest.raises(ValueError, match="either by tokens or by rows"):
        Budget()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_padding_within_rollouts_counts(num_ranks: int) -> None:
    """All rows of a micro-batch are as long as its longest one, those of the same rollout too."""
    # rollouts of 20 and 2 x 2; of 2, 3 and 6 rows of 10, 4 and 5; of 3 rows of 5
    lengths_B = torch.tensor([20, 2, 2, 10, 10, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    unit_B = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4])
    whole = Layout(packed=False, whole_rollouts=True)
    plans = plan_all(lengths_B, num_ranks, Budget(tokens=45), whole, None, unit_B)
    micro_batches = [rows for parts in plans for rows in parts if rows]
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths_B)))
    padded = [(len(rows) * int(lengths_B[rows].max()), unit_B[rows].unique().tolist()) for rows in micro_batches]
    assert all(size <= 45 or len(rollouts) == 1 for size, rollouts in padded)
    if num_ranks == 1:  # 60 alone; 2 x 10 and 6 rows more would be 80; 9 x 5 fit; 3 x 4 more would not
        assert padded == [(60, [0]), (20, [1]), (45, [3, 4]), (12, [2])]
    # counted in rollouts, it holds as many as it may
    plans = plan_all(lengths_B, num_ranks, Budget(rows=3), whole, None, unit_B)
    assert [len(unit_B[rows].unique()) for rows in plans[0]] == ([3, 2] if num_ranks == 1 else [3])


def test_packed_rows_fill_a_budget_evenly() -> None:
    lengths_B = torch.tensor([3, 10, 4, 9, 30, 2])
    # 58 tokens are two of 40; dearest first: 30 | 10 + 9 + 4 + 3 + 2
    assert plan(lengths_B, 1, 0, Budget(tokens=40), PACKED) == [[4], [0, 1, 2, 3, 5]]
    # a row over the budget goes alone; the others, 28 tokens, need two more: 10 + 3 + 2 | 9 + 4
    assert plan(lengths_B, 1, 0, Budget(tokens=20), PACKED) == [[4], [0, 1, 5], [2, 3]]
    # never more than three rows: 30 + 3 + 2 | 10 + 9 + 4
    assert plan(lengths_B, 1, 0, Budget(rows=3), PACKED) == [[0, 4, 5], [1, 2, 3]]


def test_attention_makes_long_rows_dearer_than_their_tokens() -> None:
    lengths_B = torch.tensor([40, 10, 10, 10, 10, 10, 10])
    assert plan(lengths_B, 2, 0, Budget(rows=9), PACKED) == [[0, 5]]  # 50 tokens each
    assert plan(lengths_B, 2, 0, Budget(rows=9), Layout(True, square=0.1)) == [[0]]  # 200 against 6 of 20


@pytest.mark.parametrize("layout", [PADDED, PACKED])
@pytest.mark.parametrize("budget", [Budget(tokens=10), Budget(rows=2), Budget(rows=1)])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_all_ranks_plan_the_same_number_of_micro_batches(layout: Layout, budget: Budget, num_rows: int) -> None:
    lengths_B = torch.tensor([30, 5, 5, 5, 5, 5, 5])[:num_rows]
    plans = [plan(lengths_B, 3, rank, budget, layout) for rank in range(3)]
    assert len({len(parts) for parts in plans}) == 1
    assert sorted(row for parts in plans for rows in parts for row in rows) == list(range(num_rows))
    for rows in (rows for parts in plans for rows in parts if len(rows) > 1):
        assert budget.tokens is None or sum(int(lengths_B[row]) for row in rows) <= budget.tokens
        assert budget.rows is None or len(rows) <= budget.rows


@pytest.mark.parametrize("packed", [False, True])
def test_selected_hidden_states_are_those_before_the_token(packed: bool) -> None:
    batch = make_batch(5)
    inputs = model_input(batch, CPU, Layout(packed))
    flat_ids = inputs.ids_BL.flatten()
    previous_T = batch.tokens["ids"].roll(1)
    assert torch.equal(flat_ids[inputs.select_N], previous_T[inputs.token_N])
    assert torch.equal(inputs.label_N, batch.tokens["ids"][inputs.token_N])
    assert torch.equal(inputs.token_N, batch.tokens["loss_mask"].nonzero().squeeze(-1))
    if packed:
        assert inputs.position_ids_BL is not None and inputs.ids_BL.shape == (1, len(batch.tokens["ids"]))
        starts = (inputs.position_ids_BL[0] == 0).nonzero().squeeze(-1)
        assert torch.equal(starts, batch.lengths_B.cumsum(0) - batch.lengths_B)
        assert inputs.packed is not None and torch.equal(inputs.packed.starts[:-1], starts.int())


def test_a_first_token_is_never_selected() -> None:
    batch = make_batch(3)
    batch.tokens["loss_mask"] = torch.ones_like(batch.tokens["loss_mask"])
    token_N = selected_tokens(batch)
    assert len(token_N) == len(batch.tokens["ids"]) - 3
    assert not set(token_N.tolist()) & set((batch.lengths_B.cumsum(0) - batch.lengths_B).tolist())


def test_parts_merge_into_the_batch() -> None:
    batch = make_batch(5)
    batch.tokens["top_index"] = torch.arange(3 * len(batch.tokens["ids"]), dtype=torch.int32).view(-1, 3)
    for name in ("advantages", "top_index"):
        parts = [(rows, batch.select(rows).tokens[name]) for rows in ([3, 0], [1, 2, 4], [])]
        merged = merge_rows(batch.lengths_B, parts)
        assert torch.equal(merged, batch.tokens[name]) and merged.dtype == batch.tokens[name].dtype


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("num_rows", "size", "sizes"),
    [
        (2050, 256, [257, 257, 256, 256, 256, 256, 256, 256]),  # 8 x 256 + 2: no ninth of two rows
        (2048, 256, [256] * 8),
        (2046, 256, [256] * 6 + [255] * 2),  # two trajectories failed: still eight
        (383, 256, [383]),
        (384, 256, [192, 192]),
        (7, 3, [4, 3]),
        (5, 2, [2, 2, 1]),
        (2, 256, [2]),
        (0, 256, []),
    ],
)
def test_sizes_are_even_and_near_the_size_asked_for(num_rows: int, size: int, sizes: list[int]) -> None:
    parts = list(mini_batches(range(num_rows), size, epochs=1, shuffle=False, seed=0, step=0))
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(num_rows))


@given(num_rows=st.integers(1, 3000), size=st.integers(1, 600), shuffle=st.booleans())
def test_every_row_is_in_one_mini_batch_of_an_epoch(num_rows: int, size: int, shuffle: bool) -> None:
    parts = list(mini_batches(range(num_rows), size, 1, shuffle, seed=1, step=2))
    sizes = [len(part) for part in parts]
    assert sorted(row for part in parts for row in part) == list(range(num_rows))
    assert max(sizes) - min(sizes) <= 1
    assert abs(num_rows - size * len(parts)) <= size / 2 or (len(parts) == 1 and num_rows < size)


def without_policy_tokens(batch: TrainBatch, rows: list[int]) -> TrainBatch:
    left_out_T = torch.isin(batch.row_of_token_T, torch.tensor(rows))
    return TrainBatch(
        batch.lengths_B, batch.tokens | {"loss_mask": batch.tokens["loss_mask"] & ~left_out_T}, batch.rows
    )


def test_a_row_that_is_left_out_of_the_losses_makes_no_mini_batch_smaller(model_path: str, run_dir: Path) -> None:
    """8 of 12 rows were cut at the length limit: the other 4 are the one mini-batch of 4."""
    batch = without_policy_tokens(make_batch(12), [0, 1, 3, 4, 6, 7, 9, 10])
    assert trained_rollouts(batch) == [[2], [5], [8], [11]]
    settings = [f"{ACTOR}.ppo_mini_batch_size=4"]
    engine, alone = make_engine(model_path, run_dir, *settings), make_engine(model_path, run_dir, *settings)
    assert engine.update(batch)["actor/num_updates"] == 1.0
    alone.update(batch.select([2, 5, 8, 11]))
    assert relative_error(full_state(engine), full_state(alone)) < 1e-6


def test_a_remainder_takes_no_step_of_its_own(model_path: str, run_dir: Path) -> None:
    """9 rows in mini-batches of 4 are 5 and 4: what one row says is not normalised by itself."""
    batch = make_batch(9)
    engine, by_hand = (make_engine(model_path, run_dir, f"{ACTOR}.ppo_mini_batch_size={size}") for size in (4, 9))
    assert engine.update(batch)["actor/num_updates"] == 2.0
    for rows in (range(5), range(5, 9)):
        by_hand.learner.learn(batch.select(list(rows)), by_hand.objective, 0)
    assert relative_error(full_state(engine), full_state(by_hand)) < 1e-6
