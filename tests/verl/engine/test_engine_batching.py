"""How batches are cut and put together again."""

from __future__ import annotations

import pytest
import torch
from engine_cases import CPU, make_batch

from verl.engine.batching import Budget, cut, merge_rows, model_input, plan, selected_tokens, split_rows


def test_rows_go_to_the_rank_with_the_fewest_tokens() -> None:
    # longest first: 9 -> rank 0, 7 -> rank 1, 5 -> rank 1 (7 < 9), 4 -> rank 0 (9 < 12), 2 -> rank 1 (12 < 13)
    assert split_rows(torch.tensor([4, 9, 2, 7, 5]), 2) == [[0, 1], [2, 3, 4]]
    assert split_rows(torch.tensor([3]), 2) == [[0], []]


def test_token_budget_counts_padding_and_sorts_by_length() -> None:
    lengths_B = torch.tensor([3, 10, 4, 9, 30])
    # 30 alone (over the budget); 10 and 9 padded to 10: 20; 4 and 3 padded to 4: 8
    assert cut(lengths_B, range(5), Budget(tokens=20)) == [[4], [1, 3], [2, 0]]
    assert cut(lengths_B, [0, 2], Budget(tokens=20)) == [[2, 0]]
    assert cut(lengths_B, range(5), Budget(rows=2)) == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="either by tokens or by rows"):
        Budget()


def test_all_ranks_plan_the_same_number_of_micro_batches() -> None:
    lengths_B = torch.tensor([30, 5, 5, 5, 5, 5, 5])
    plans = [plan(lengths_B, range(7), 3, rank, Budget(tokens=10)) for rank in range(3)]
    assert {len(parts) for parts in plans} == {2}
    assert sorted(row for parts in plans for rows in parts for row in rows) == list(range(7))
    assert [] in plans[0]
    subset = plan(lengths_B, [6, 2], 2, 1, Budget(rows=1)) + plan(lengths_B, [6, 2], 2, 0, Budget(rows=1))
    assert sorted(subset) == [[2], [6]]


@pytest.mark.parametrize("packed", [False, True])
def test_selected_hidden_states_are_those_before_the_token(packed: bool) -> None:
    batch = make_batch(5)
    inputs = model_input(batch, CPU, packed)
    flat_ids = inputs.ids_BL.flatten()
    previous_T = batch.tokens["ids"].roll(1)
    assert torch.equal(flat_ids[inputs.select_N], previous_T[inputs.token_N])
    assert torch.equal(inputs.label_N, batch.tokens["ids"][inputs.token_N])
    assert torch.equal(inputs.token_N, batch.tokens["loss_mask"].nonzero().squeeze(-1))
    if packed:
        assert inputs.position_ids_BL is not None and inputs.ids_BL.shape == (1, len(batch.tokens["ids"]))
        starts = (inputs.position_ids_BL[0] == 0).nonzero().squeeze(-1)
        assert torch.equal(starts, batch.lengths_B.cumsum(0) - batch.lengths_B)


def test_a_first_token_is_never_selected() -> None:
    batch = make_batch(3)
    batch.tokens["loss_mask"] = torch.ones_like(batch.tokens["loss_mask"])
    token_N = selected_tokens(batch)
    assert len(token_N) == len(batch.tokens["ids"]) - 3
    assert not set(token_N.tolist()) & set((batch.lengths_B.cumsum(0) - batch.lengths_B).tolist())


def test_parts_merge_into_the_batch() -> None:
    batch = make_batch(5)
    batch.tokens["wide"] = torch.arange(3 * len(batch.tokens["ids"]), dtype=torch.int32).view(-1, 3)
    for name in ("advantages", "wide"):
        parts = [(rows, batch.select(rows).tokens[name]) for rows in ([3, 0], [1, 2, 4], [])]
        merged = merge_rows(batch.lengths_B, parts)
        assert torch.equal(merged, batch.tokens[name]) and merged.dtype == batch.tokens[name].dtype
