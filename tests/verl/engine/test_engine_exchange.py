"""Columns that ranks keep for themselves: they reach the rank that needs them, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import engine_workers
import pytest
import torch
from engine_cases import make_batch, make_engine

from verl.engine.batching import RankValues


def test_rows_go_to_who_wants_them(tmp_path: Path, model_path: str, other_model_path: str) -> None:
    """By hand: four rows of 2, 1, 3 and 2 tokens."""
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 2, engine_workers.exchange_rows)
    (rows, first), (others, second) = (rank["got"] for rank in ranks)
    assert (rows, others) == ([3, 1], [0, 3, 2])  # by owner, in the order in which they are wanted
    assert first["value"].tolist() == [30, 31, 10]
    assert second["value"].tolist() == [0, 1, 30, 31, 20, 21, 22]
    assert second["pair"].tolist() == [[0, 0], [1, -1], [30, -30], [31, -31], [20, -20], [21, -21], [22, -22]]
    assert [rank["again"][0] for rank in ranks] == [[], [1]]
    assert [rank["found"]["value"].tolist() for rank in ranks] == [[30, 31, 10], [30, 31, 0, 1]]
    assert all("no rank has row 1" in rank["message"] for rank in ranks)


def test_the_same_update_with_columns_that_stay(tmp_path: Path, model_path: str, other_model_path: str) -> None:
    """Two ranks, two shuffled epochs: metrics and weights to the last bit."""
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 2, engine_workers.learn_from_own_columns)
    for rank in ranks:
        (metrics, weights), (expected, expected_weights) = rank["own"], rank["whole"]
        assert metrics == expected and metrics[0]["actor/kl_loss"] > 0
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


def test_rows_that_nobody_found(tmp_path: Path, model_path: str) -> None:
    engine = make_engine(model_path, tmp_path)
    batch = make_batch(3)
    own = RankValues([0, 2], {"top_index": torch.zeros(int(batch.lengths_B[[0, 2]].sum()), 4, dtype=torch.int32)})
    with pytest.raises(ValueError, match="no rank has row 1"):
        engine.update(batch, own)
