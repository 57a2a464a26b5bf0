"""KL in the reward: numbers by hand, and what is masked never counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.kl import kl_to_go, penalised_rewards

NAN = float("nan")
MASK_T = torch.tensor([True, False, True, True, True])


def test_penalised_rewards_by_hand() -> None:
    reward_T = torch.tensor([0.0, 7.0, 1.0, 0.0, -1.0])
    kl_T = torch.tensor([1.0, NAN, -2.0, 0.0, 4.0], requires_grad=True)
    penalised_T = penalised_rewards(reward_T, kl_T, MASK_T, beta=0.5)
    assert penalised_T.tolist() == [-0.5, 7.0, 2.0, 0.0, -3.0]
    assert not penalised_T.requires_grad
    assert reward_T.tolist() == [0.0, 7.0, 1.0, 0.0, -1.0]


def test_kl_to_go_by_hand() -> None:
    # row 0: 1, masked, 4; row 3: 2, -5
    kl_T = torch.tensor([1.0, NAN, 4.0, 2.0, -5.0], requires_grad=True)
    to_go_T = kl_to_go(kl_T, MASK_T, torch.tensor([0, 0, 0, 3, 3]))
    assert to_go_T.tolist() == [5.0, 4.0, 4.0, -3.0, -5.0]
    assert to_go_T.dtype == torch.float32 and not to_go_T.requires_grad


def test_kl_to_go_of_no_token() -> None:
    assert kl_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_short_row_after_long_ones_keeps_its_precision() -> None:
    kl_T = torch.cat([torch.full((200_000,), 1000.0), torch.tensor([1e-4, 2e-4])])
    row_T = torch.cat([torch.zeros(200_000, dtype=torch.int64), torch.ones(2, dtype=torch.int64)])
    to_go_T = kl_to_go(kl_T, torch.ones(200_002, dtype=torch.bool), row_T)
    torch.testing.assert_close(to_go_T[-2:], torch.tensor([3e-4, 2e-4]), rtol=1e-3, atol=0)


def test_rows_out_of_order_are_an_error() -> None:
    with pytest.raises(ValueError, match="row_T goes down"):
        kl_to_go(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 0]))


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5))
def test_kl_to_go_is_the_masked_sum_to_the_end_of_each_row(rows: list[list[tuple[float, bool]]]) -> None:
    kl_T = torch.tensor([kl for row in rows for kl, _ in row], dtype=torch.float64)
    mask_T = torch.tensor([kept for row in rows for _, kept in row])
    row_T = torch.tensor([number for number, row in enumerate(rows) for _ in row])
    expected = [sum(kl for kl, kept in row[start:] if kept) for row in rows for start in range(len(row))]
    assert kl_to_go(kl_T, mask_T, row_T).tolist() == pytest.approx(expected, abs=1e-12)
