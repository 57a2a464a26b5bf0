"""Columns of a batch in the object store, with real actors that read them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from verl.engine.batching import RankValues
from verl.protocol import TrainBatch
from verl.single_controller.shared_batch import SharedBatch, SharedValues, merged, share

NUM_TOKENS = 4_000_000  # a column of 32 MB, far above what Ray sends inside a message


class Rank:
    """Reads batches as a rank of a role does."""

    def sums(self, batch: SharedBatch) -> dict[str, float]:
        found = batch.fetch()
        return {name: float(column.sum()) for name, column in (found.tokens | found.rows).items()}

    def own_memory(self, batch: SharedBatch | None) -> int:
        """Bytes of this process alone while it has the batch, all of which it has read."""
        held = None if batch is None else batch.fetch()
        total = 0.0 if held is None else sum(float(column.max()) for column in held.tokens.values())
        assert total >= 0
        return int(psutil.Process().memory_full_info().uss)

    def answer(self, rows: list[int], values: list[float]) -> SharedValues:
        return SharedValues.of(RankValues(rows, {"value": torch.tensor(values)}))


@pytest.fixture(scope="module")
def rank(ray_session: Any) -> Iterator[Any]:
    actor = ray_session.remote(Rank).options(num_cpus=0).remote()
    yield actor
    ray_session.kill(actor)


def make(num_tokens: int = 6) -> TrainBatch:
    lengths_B = torch.tensor([2, 1, num_tokens - 3])
    tokens = {"ids": torch.arange(num_tokens), "loss_mask": torch.ones(num_tokens, dtype=torch.bool)}
    return TrainBatch(lengths_B, tokens, {"reward": torch.tensor([0.5, 0.25, 0.25])})


def test_what_ranks_read(ray_session: Any, rank: Any) -> None:
    batch = make()
    shared = share(batch, ("ids", "loss_mask", "not there"), ("reward",))
    assert ray_session.get(rank.sums.remote(shared)) == {"ids": 15.0, "loss_mask": 6.0, "reward": 1.0}
    assert set(share(batch, ("ids",)).fetch().tokens) == {"ids"}
    assert shared.fetch().lengths_B.tolist() == [2, 1, 3]


def test_ranks_always_know_which_rows_are_one_rollout(ray_session: Any) -> None:
    batch = make()
    batch.rows["rollout"] = torch.tensor([0, 1, 1])
    assert share(batch, ("ids",)).fetch().rollout_B.tolist() == [0, 1, 1]


def test_a_column_is_written_once(ray_session: Any) -> None:
    """For all calls and roles, and until its batch is gone."""
    batch = make()
    first = share(batch, ("ids", "loss_mask"))
    batch.tokens["advantages"] = torch.zeros(6)
    later = share(
        TrainBatch(batch.lengths_B, batch.tokens | {"loss_mask": torch.zeros(6, dtype=torch.bool)}), batch.tokens
    )
    assert later.tokens["ids"] == first.tokens["ids"] and later.lengths == first.lengths
    assert later.tokens["loss_mask"] != first.tokens["loss_mask"]
    assert later.fetch().tokens["loss_mask"].sum() == 0
    ids = weakref.ref(batch.tokens["ids"])
    del batch, later
    gc.collect()
    assert ids() is None, "the object store's entry keeps the tensor"


def test_a_rank_has_no_copy(ray_session: Any, rank: Any) -> None:
    """36 MB that are read leave the process as large as it was."""
    batch = make(NUM_TOKENS)
    before = ray_session.get(rank.own_memory.remote(None))
    during = ray_session.get(rank.own_memory.remote(share(batch, batch.tokens)))
    assert during - before < 8 * 2**20


def test_answers_of_two_ranks_by_hand(ray_session: Any, rank: Any) -> None:
    """Rows 2 and 0 from one, row 1 from the other."""
    answers = ray_session.get([rank.answer.remote([2, 0], [1.0, 2, 3, 4, 5]), rank.answer.remote([1], [6.0])])
    assert isinstance(answers[0].tokens["value"], np.ndarray)
    assert merged(make(), answers)["value"].tolist() == [4, 5, 6, 1, 2, 3]
