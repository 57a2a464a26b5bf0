"""The cut of a step into mini-batches: even, of the rows that are trained, and the same on any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import make_batch, make_engine, relative_error
from engine_state import full_state
from hypothesis import given
from hypothesis import strategies as st

from verl.engine.batching import trained_rows
from verl.engine.mini_batches import mini_batches
from verl.protocol import TrainBatch

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
    assert trained_rows(batch) == [2, 5, 8, 11]
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
