"""Weights of tokens in a mini-batch's loss: by hand, and against means over padded tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.aggregation import LOSS_AGGREGATIONS, loss_weights

# Rows 0, 1, 2 have 3, 2 and 2 tokens, of which 2, 1 and 0 are the policy's: N = 3, R = 2
ROW_T = torch.tensor([0, 0, 0, 1, 1, 2, 2])
MASK_T = torch.tensor([False, True, True, True, False, False, False])


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0]),
        ("seq-mean-token-sum", [0, 1 / 2, 1 / 2, 1 / 2, 0, 0, 0]),
        ("seq-mean-token-mean", [0, 1 / 4, 1 / 4, 1 / 2, 0, 0, 0]),
        ("seq-mean-token-sum-norm", [0, 1 / 16, 1 / 16, 1 / 16, 0, 0, 0]),  # constant 8
    ],
)
def test_weights_by_hand(mode: str, weights: list[float]) -> None:
    weight_T = loss_weights(MASK_T, ROW_T, 3, mode, constant=8)
    torch.testing.assert_close(weight_T, torch.tensor(weights))


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_a_mini_batch_without_policy_tokens_weighs_nothing(mode: str) -> None:
    assert loss_weights(torch.zeros(7, dtype=torch.bool), ROW_T, 3, mode, constant=8).tolist() == [0.0] * 7


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'; known: token-mean, seq-mean-token-sum, "):
        loss_weights(MASK_T, ROW_T, 3, "mean")
    for constant in (None, 0.0, -3.0):
        with pytest.raises(ValueError, match=f"'seq-mean-token-sum-norm' needs a constant .* got {constant}"):
            loss_weights(MASK_T, ROW_T, 3, "seq-mean-token-sum-norm", constant)


@st.composite
def masks(draw: st.DrawFn) -> list[list[bool]]:
    """One list of booleans a row, with at least one policy token in all."""
    rows = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
    rows[draw(st.integers(0, len(rows) - 1))][0] = True
    return rows


def flat(rows: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    row_T = torch.tensor([number for number, row in enumerate(rows) for _ in row])
    return torch.tensor([value for row in rows for value in row]), row_T


def by_padding(loss_BL: torch.Tensor, mask_BL: torch.Tensor, mode: str, constant: float) -> torch.Tensor:
    """The modes as means of means over a padded [B, L] loss, rows without policy tokens left out."""
    used = mask_BL.any(1)
    loss_BL, mask_BL = loss_BL[used], mask_BL[used]
    sums_B = (loss_BL * mask_BL).sum(1)
    return {
        "token-mean": loss_BL[mask_BL].mean(),
        "seq-mean-token-sum": sums_B.mean(),
        "seq-mean-token-mean": (sums_B / mask_BL.sum(1)).mean(),
        "seq-mean-token-sum-norm": (sums_B / constant).mean(),
    }[mode]


@given(masks(), st.sampled_from(LOSS_AGGREGATIONS), st.integers(0, 2**31))
def test_equal_to_means_over_padded_tensors(rows: list[list[bool]], mode: str, seed: int) -> None:
    mask_T, row_T = flat(rows)
    loss_T = torch.randn(len(mask_T), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lengths = [len(row) for row in rows]
    loss_BL = torch.nn.utils.rnn.pad_sequence(list(loss_T.split(lengths)), batch_first=True, padding_value=99.0)
    mask_BL = torch.nn.utils.rnn.pad_sequence(list(mask_T.split(lengths)), batch_first=True)
    loss = (loss_weights(mask_T, row_T, len(rows), mode, constant=5.0) * loss_T).sum()
    torch.testing.assert_close(loss, by_padding(loss_BL, mask_BL, mode, 5.0), atol=1e-6, rtol=1e-6)


@given(masks(), st.sampled_from(LOSS_AGGREGATIONS), st.integers(0, 2**31))
def test_order_of_tokens_and_rows_does_not_matter(rows: list[list[bool]], mode: str, seed: int) -> None:
    """So tokens of a row may lie anywhere, and any cut of the rows sums to the same loss."""
    mask_T, row_T = flat(rows)
    generator = torch.Generator().manual_seed(seed)
    order_T, names_B = torch.randperm(len(mask_T), generator=generator), torch.randperm(len(rows), generator=generator)
    weight_T = loss_weights(mask_T, row_T, len(rows), mode, constant=5.0)
    moved_T = loss_weights(mask_T[order_T], names_B[row_T][order_T], len(rows), mode, constant=5.0)
    assert torch.equal(moved_T, weight_T[order_T])


@given(masks(), st.sampled_from(LOSS_AGGREGATIONS), st.integers(1, 6))
def test_parts_sum_to_the_whole(rows: list[list[bool]], mode: str, size: int) -> None:
    """Cut after every `size` rows: the micro-batches' shares of a loss of 1 per token add up to that loss."""
    mask_T, row_T = flat(rows)
    weight_T = loss_weights(mask_T, row_T, len(rows), mode, constant=5.0)
    part_T = row_T // size
    parts = [weight_T[part_T == number].sum() for number in range(int(part_T.max()) + 1)]
    length = len(mask_T[mask_T]) / len({int(row) for row in row_T[mask_T]})
    whole = {"token-mean": 1.0, "seq-mean-token-mean": 1.0, "seq-mean-token-sum": length}.get(mode, length / 5.0)
    assert float(sum(parts)) == pytest.approx(whole, rel=1e-5)
