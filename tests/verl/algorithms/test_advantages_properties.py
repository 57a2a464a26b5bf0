"""What holds for every estimator on any batch, and that equal rewards give advantages of exactly zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given as generated
from hypothesis import strategies as st
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings

NAN = float("nan")
BASELINED = [
    ("grpo", "group_std"),
    ("grpo", "none"),
    ("grpo", "batch_std"),
    ("grpo_turns", "none"),
    ("grpo_turns", "batch_std"),
    ("rloo", "none"),
    ("opo", "none"),
    ("reinforce_plus_plus_baseline", "none"),
]

NUMBER = st.integers(-8, 8).map(lambda number: number / 4)
TOKEN = st.tuples(st.booleans(), NUMBER, NUMBER)  # is a policy token, reward, value
ANY_ROW = st.lists(TOKEN, min_size=1, max_size=6)
TRAINED_ROW = ANY_ROW.map(lambda row: [*row, (True, 0.5, 0.0)])
ROW_OF_GROUP = st.tuples(st.integers(0, 2), ANY_ROW, NUMBER)  # group, tokens, greedy baseline
ANY_BATCH = st.lists(ROW_OF_GROUP, min_size=1, max_size=6)
GROUP = st.lists(st.tuples(TRAINED_ROW, NUMBER), min_size=2, max_size=4)
FULL_GROUPS = st.lists(GROUP, min_size=1, max_size=3).map(
    lambda groups: [(g, row, baseline) for g, group in enumerate(groups) for row, baseline in group]
)
SETTINGS = AdvantageSettings(gamma=0.75, lam=0.5, scale="none")

Rows = list[tuple[int, list[tuple[bool, float, float]], float]]


def build(rows: Rows) -> AdvantageInput:
    tokens = [(number, *token) for number, (_, row, _) in enumerate(rows) for token in row]
    return AdvantageInput(
        reward_T=f64([reward for _, _, reward, _ in tokens]),
        mask_T=torch.tensor([policy for _, policy, _, _ in tokens], dtype=torch.bool),
        row_T=torch.tensor([number for number, _, _, _ in tokens], dtype=torch.int64),
        group_B=torch.tensor([group for group, _, _ in rows], dtype=torch.int64),
        value_T=f64([value for _, _, _, value in tokens]),
        baseline_B=f64([baseline for _, _, baseline in rows]),
        turn_T=torch.tensor([turn for _, row, _ in rows for turn in turns_of(row)], dtype=torch.int64),
    )


def turns_of(row: list[tuple[bool, float, float]]) -> list[int]:
    """Of each token, how many runs of policy tokens ended before it."""
    ends = [was_policy and not is_policy for (was_policy, *_), (is_policy, *_) in pairwise(row)]
    return [0, *accumulate(ends)]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at_policy_tokens(name: str, given: AdvantageInput, settings: AdvantageSettings = SETTINGS) -> list[Tensor]:
    answer: Advantages = ADVANTAGES[name](given, settings)
    return [part[given.mask_T] for part in (answer.advantage_T, answer.return_T) if part is not None]


def advantages_of_rows(name: str, given: AdvantageInput, settings: AdvantageSettings = SETTINGS) -> Tensor:
    """[B]: the advantage at each row's last token, which is a policy token."""
    last_B = torch.bincount(given.row_T).cumsum(0) - 1
    return ADVANTAGES[name](given, settings).advantage_T[last_B]


def sums_over_groups(value_B: Tensor, group_B: Tensor) -> Tensor:
    return torch.stack([value_B[group_B == group].sum() for group in group_B.unique()])


@generated(rows=ANY_BATCH, garbage=st.sampled_from([NAN, float("inf"), 1e30]))
def test_what_lies_outside_the_mask_is_never_read(rows: Rows, garbage: float) -> None:
    given = build(rows)
    assert given.value_T is not None
    spoilt = replace(
        given,
        reward_T=given.reward_T.masked_fill(~given.mask_T, garbage),
        value_T=given.value_T.masked_fill(~given.mask_T, garbage),
    )
    for name in ADVANTAGES:
        clean, other = ADVANTAGES[name](given, SETTINGS), ADVANTAGES[name](spoilt, SETTINGS)
        assert torch.equal(clean.advantage_T, other.advantage_T) and clean.advantage_T.isfinite().all(), name
        assert not other.advantage_T[~given.mask_T].any(), name
        if clean.return_T is not None and other.return_T is not None:
            assert torch.equal(clean.return_T, other.return_T) and not other.return_T[~given.mask_T].any(), name


@generated(rows=ANY_BATCH)
def test_removing_environment_tokens_changes_nothing(rows: Rows) -> None:
    given = build(rows)
    kept_T = given.mask_T
    assert given.value_T is not None
    shorter = replace(
        given,
        reward_T=given.reward_T[kept_T],
        mask_T=kept_T[kept_T],
        row_T=given.row_T[kept_T],
        value_T=given.value_T[kept_T],
        turn_T=None if given.turn_T is None else given.turn_T[kept_T],
    )
    for name in ADVANTAGES:
        for whole, part in zip(at_policy_tokens(name, given), at_policy_tokens(name, shorter), strict=True):
            assert torch.equal(whole, part), name


@generated(rows=ANY_BATCH, data=st.data())
def test_the_order_of_rows_changes_nothing(rows: Rows, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    given, moved = build(rows), build([rows[i] for i in order])
    tokens_of = [torch.nonzero(given.row_T == row).flatten() for row in range(len(rows))]
    index_T = torch.cat([tokens_of[i] for i in order])
    for name in ADVANTAGES:
        before, after = (ADVANTAGES[name](batch, SETTINGS).advantage_T for batch in (given, moved))
        torch.testing.assert_close(after, before[index_T], atol=1e-9, rtol=0, msg=name)


@generated(rows=FULL_GROUPS, shifts=st.lists(NUMBER, min_size=3, max_size=3))
def test_a_constant_on_all_rewards_of_a_group_changes_nothing(rows: Rows, shifts: list[float]) -> None:
    """And for REINFORCE, which has no groups, one on all rewards of the batch."""
    assert_same_when_shifted(rows, shifts, BASELINED)
    assert_same_when_shifted(rows, shifts[:1] * 3, [("reinforce", "none"), ("reinforce", "batch_std")])


def assert_same_when_shifted(rows: Rows, shifts: list[float], estimators: list[tuple[str, str]]) -> None:
    shifted = [(g, [*row[:-1], (True, row[-1][1] + shifts[g], 0.0)], baseline) for g, row, baseline in rows]
    for name, scale in estimators:
        settings = AdvantageSettings(scale=scale)
        before_B, after_B = (advantages_of_rows(name, build(r), settings) for r in (rows, shifted))
        torch.testing.assert_close(after_B, before_B, atol=1e-6, rtol=0, msg=f"{name}, {scale}")


@generated(rows=FULL_GROUPS)
def test_sums_to_zero_and_rloo_is_the_centred_reward_times_n_over_n_minus_one(rows: Rows) -> None:
    given = build(rows)
    for name in ("grpo", "rloo"):
        sums = sums_over_groups(advantages_of_rows(name, given), given.group_B)
        torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-12, rtol=0, msg=name)
    size_B = torch.bincount(given.group_B)[given.group_B].double()
    torch.testing.assert_close(
        advantages_of_rows("rloo", given), size_B / (size_B - 1) * advantages_of_rows("grpo", given), atol=1e-12, rtol=0
    )


@generated(rows=ANY_BATCH, data=st.data())
def test_gae_reads_values_on_its_chain_only(rows: Rows, data: st.DataObject) -> None:
    given = build(rows)
    extra = data.draw(st.lists(st.booleans(), min_size=len(given.row_T), max_size=len(given.row_T)))
    chain_T = given.mask_T | torch.tensor(extra)
    assert given.value_T is not None
    clean = replace(given, chain_T=chain_T)
    spoilt = replace(
        clean, reward_T=given.reward_T.masked_fill(~given.mask_T, NAN), value_T=given.value_T.masked_fill(~chain_T, NAN)
    )
    before, after = ADVANTAGES["gae"](clean, SETTINGS), ADVANTAGES["gae"](spoilt, SETTINGS)
    assert torch.equal(before.advantage_T, after.advantage_T)
    assert not after.advantage_T[~chain_T].any()


# What each estimator compares: the rows of a group or those of the batch.
COMPARING = [
    *(("grpo", scale) for scale in ("group_std", "none", "batch_std")),
    *(("reinforce", scale) for scale in ("none", "batch_std")),
    *((name, "none") for name in ("rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")),
]
REWARDS = (0.8, 0.1, 0.7, 1 / 3, -0.3, 123.456, 1e-6)


def outcomes(rewards: Sequence[float], groups: Sequence[int], dtype: torch.dtype = torch.float32) -> AdvantageInput:
    """Rows of two environment tokens and 1, 2 or 3 policy tokens; the reward lies at the last one."""
    tokens = [
        (row, policy, reward if last else 0.0)
        for row, reward in enumerate(rewards)
        for policy, last in [(False, False), (False, False), *((True, i == row % 3) for i in range(row % 3 + 1))]
    ]
    return AdvantageInput(
        reward_T=torch.tensor([reward for _, _, reward in tokens], dtype=dtype),
        mask_T=torch.tensor([policy for _, policy, _ in tokens]),
        row_T=torch.tensor([row for row, _, _ in tokens]),
        group_B=torch.tensor(groups),
    )


def advantages(name: str, given: AdvantageInput, scale: str = "none") -> Tensor:
    found = ADVANTAGES[name](given, AdvantageSettings(scale=scale)).advantage_T
    assert found.dtype == given.reward_T.dtype
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "scale"), COMPARING)
def test_equal_rewards_give_no_advantage(name: str, scale: str, dtype: torch.dtype) -> None:
    for reward in REWARDS:
        for n in (2, 3, 5, 6, 7, 11, 16, 25, 33):
            found_T = advantages(name, outcomes([reward] * n, [0] * n, dtype), scale)
            assert not found_T.any(), f"{n} rewards of {reward}: {found_T.abs().max()}"


@pytest.mark.parametrize("name", ["grpo", "grpo_turns", "rloo", "opo"])
@pytest.mark.parametrize("scale", ["group_std", "none", "batch_std"])
def test_a_dead_group_beside_a_living_one(name: str, scale: str) -> None:
    given = outcomes([0.8] * 8 + [0.0, 1.0, 0.8] + [0.1] * 16, [0] * 8 + [1] * 3 + [2] * 16)
    found_T = advantages(name, given, scale)
    group_T = given.group_B[given.row_T]
    assert not found_T[group_T != 1].any() and found_T[(group_T == 1) & given.mask_T].all()


@pytest.mark.parametrize("name", ["grpo", "grpo_turns", "rloo", "opo"])
def test_rows_that_take_no_part_leave_equal_rewards_equal(name: str) -> None:
    """Row 2 has no policy token (what is left of a failed trajectory); with two others it is a group of 0.8."""
    given = outcomes([0.8, 0.8, 0.3, 0.8], [0, 0, 0, 0])
    assert not advantages(name, replace(given, mask_T=given.mask_T & (given.row_T != 2)), "group_std").any()


def test_the_greedy_answers_reward_is_no_advantage_over_itself() -> None:
    given = replace(outcomes(REWARDS, range(len(REWARDS))), baseline_B=torch.tensor(REWARDS))
    assert not advantages("remax", given).any()


def test_a_critic_that_knows_the_reward_leaves_no_advantage() -> None:
    given = outcomes([0.8] * 6, range(6))
    assert not advantages("gae", replace(given, value_T=torch.full_like(given.reward_T, 0.8))).any()


@pytest.mark.parametrize("n", [3, 5, 8, 16])
def test_nearly_equal_rewards_are_centred_as_exactly_as_they_are_given(n: int) -> None:
    """One reward is one float32 step higher. Exact rational arithmetic says what the centred rewards are."""
    base = torch.tensor(0.8)
    rewards = [float(base)] * (n - 1) + [float(torch.nextafter(base, torch.tensor(1.0)))]
    exact = [Fraction(reward) for reward in rewards]
    expected = torch.tensor([float(reward - sum(exact) / n) for reward in exact])
    found_T = advantages("grpo", given := outcomes(rewards, [0] * n))
    last_T = torch.cat([given.row_T.diff() != 0, torch.tensor([True])])
    torch.testing.assert_close(found_T[last_T], expected, atol=0, rtol=1e-6)
