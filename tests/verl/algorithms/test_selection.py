"""What is trained on, and the penalty for overlong trajectories; numbers by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.selection import informative_rows, zero_variance_groups


def test_zero_variance_groups_by_hand() -> None:
    # group 0: 1, 1 (equal); 1: 0, 1; 2: one row; 3: no row; 4: three times -0.3 (equal)
    reward_B = torch.tensor([1.0, 0.0, -0.3, 1.0, 1.0, 0.5, -0.3, -0.3])
    group_B = torch.tensor([0, 1, 4, 0, 1, 2, 4, 4])
    assert zero_variance_groups(reward_B, group_B).tolist() == [True, False, False, False, True]
    assert informative_rows(reward_B, group_B).tolist() == [False, True, False, False, True, True, False, False]


def test_rewards_that_differ_a_little_differ() -> None:
    reward_B = torch.tensor([1.0, 1.0 + torch.finfo(torch.float32).eps])
    assert zero_variance_groups(reward_B, torch.tensor([0, 0])).tolist() == [False]


def test_no_row_no_group() -> None:
    none_B = torch.zeros(0, dtype=torch.int64)
    assert zero_variance_groups(torch.zeros(0), none_B).tolist() == []
    assert informative_rows(torch.zeros(0), none_B).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1), st.randoms())
def test_equal_to_counting_different_rewards(rows: list[tuple[int, float]], random) -> None:
    """A row is kept when its group has one row or at least two different rewards, in whatever order the rows come."""
    random.shuffle(rows)
    members = {group: [reward for other, reward in rows if other == group] for group, _ in rows}
    expected = [len(members[group]) == 1 or len(set(members[group])) > 1 for group, _ in rows]
    kept_B = informative_rows(torch.tensor([r for _, r in rows]), torch.tensor([group for group, _ in rows]))
    assert kept_B.tolist() == expected
