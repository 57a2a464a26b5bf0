"""Advantage estimators, GAE among them: by hand, by autograd on the definition, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from exact_numbers import NAN, f64, same
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, EPSILON, AdvantageInput, Advantages, AdvantageSettings


def batch(rows: Sequence[Sequence[float]], groups: Sequence[int]) -> AdvantageInput:
    """Rows of token rewards; NaN is an environment token."""
    reward_T = f64(*(reward for row in rows for reward in row))
    row_T = torch.tensor([number for number, row in enumerate(rows) for _ in row], dtype=torch.int64)
    return AdvantageInput(reward_T, ~reward_T.isnan(), row_T, torch.tensor(groups))


def outcomes(rewards: Sequence[float], groups: Sequence[int]) -> AdvantageInput:
    """One environment token (the prompt) and one policy token (the answer) a row."""
    return batch([[NAN, reward] for reward in rewards], groups)


def estimate(name: str, given: AdvantageInput, **settings: float | str) -> Advantages:
    return ADVANTAGES[name](given, AdvantageSettings(**settings))  # type: ignore[arg-type]


def by_row(name: str, given: AdvantageInput, **settings: float | str) -> Tensor:
    return estimate(name, given, **settings).advantage_T[given.mask_T]


# group 0: rewards 1, 0, 0, 1 (mean 1/2, unbiased variance (4 * 1/4) / 3 = 1/3); group 1: 2, 5 (mean 7/2, variance 9/2);
# group 2: 0.75, the only one left
GROUPS = outcomes([1.0, 2.0, 0.0, 0.0, 5.0, 1.0, 0.75], [0, 1, 0, 0, 1, 0, 2])
CENTRED_B = f64(0.5, -1.5, -0.5, -0.5, 1.5, 0.5, 0)


def test_grpo_over_the_group_std_or_undivided() -> None:
    small, large = (1 / 3) ** 0.5 + 1e-6, 4.5**0.5 + 1e-6
    same(by_row("grpo", GROUPS), CENTRED_B / f64(small, large, small, small, large, small, 1))
    assert estimate("grpo", GROUPS).batch_std is None and estimate("grpo", GROUPS).return_T is None
    same(by_row("grpo", GROUPS, scale="none"), CENTRED_B)


def test_grpo_over_the_batch_std() -> None:
    # of the six that are compared: sum 0, sum of squares 4 * 0.25 + 2 * 2.25 = 5.5, variance 5.5 / 5
    std = 1.1**0.5
    same(by_row("grpo", GROUPS, scale="batch_std"), CENTRED_B / (std + EPSILON))
    same(estimate("grpo", GROUPS, scale="batch_std").batch_std, torch.tensor(std, dtype=torch.float64))


def test_a_rows_reward_is_the_sum_over_its_policy_tokens_and_goes_to_all_of_them() -> None:
    # rewards 0.25 + 0.5 + 0.25 = 1 and 0
    given = batch([[NAN, 0.25, 0.5, NAN, 0.25], [NAN, NAN, 0.0]], [0, 0])
    same(estimate("grpo", given, scale="none").advantage_T, f64(0, 0.5, 0.5, 0, 0.5, 0, 0, -0.5))


def test_a_row_without_policy_tokens_takes_no_part() -> None:
    # rewards 1 and 0 with mean 1/2; were the empty row scored 0, the mean would be 1/3
    given = batch([[NAN, 1.0], [NAN, NAN], [NAN, 0.0]], [0, 0, 0])
    for name in ("grpo", "reinforce", "opo"):
        same(by_row(name, given, scale="none"), f64(0.5, -0.5))
    same(by_row("rloo", given), f64(1.0, -1.0))


def test_rloo() -> None:
    # 1 - (0 + 0 + 1) / 3, 2 - 5, 0 - (1 + 0 + 1) / 3, .., 5 - 2, .., alone: nothing to compare with
    same(by_row("rloo", GROUPS), f64(2 / 3, -3, -2 / 3, -2 / 3, 3, 2 / 3, 0))


def test_reinforce() -> None:
    # mean (3 + 0 + 0 + 1) / 4 = 1, variance (4 + 1 + 1 + 0) / 3 = 2
    given, centred_B = outcomes([3.0, 0.0, 0.0, 1.0], [0, 0, 1, 2]), f64(2, -1, -1, 0)
    same(by_row("reinforce", given, scale="none"), centred_B)
    same(by_row("reinforce", given, scale="group_std"), centred_B)
    same(by_row("reinforce", given, scale="batch_std"), centred_B / (2**0.5 + 1e-6))
    same(estimate("reinforce", given, scale="batch_std").batch_std, f64(2).sqrt().squeeze())
    same(by_row("reinforce", outcomes([3.0], [0])), f64(3))


def test_reinforce_plus_plus() -> None:
    # gamma 1/2: returns 0 + 1/2, 1 | 2. Mean 7/6, differences -4/6, -1/6, 5/6, variance (16 + 1 + 25) / 36 / 2 = 7/12
    given = batch([[NAN, 0.0, NAN, NAN, 1.0], [NAN, 2.0]], [0, 1])
    answer = estimate("reinforce_plus_plus", given, gamma=0.5)
    same(answer.return_T, f64(0, 0.5, 0, 0, 1, 0, 2))
    same(answer.advantage_T, f64(0, -4, 0, 0, -1, 0, 5) / 6 / (7 / 12 + 1e-8) ** 0.5)


def test_reinforce_plus_plus_baseline() -> None:
    # centred by group: 1/2, 1/2 | -1/2 | 1 | -1 at tokens; mean 1/10, differences 4, 4, -6, 9, -11 tenths,
    # variance (16 + 16 + 36 + 81 + 121) / 100 / 4 = 0.675
    given = batch([[NAN, 0.0, 1.0], [NAN, 0.0], [3.0], [1.0]], [0, 0, 1, 1])
    answer = estimate("reinforce_plus_plus_baseline", given)
    same(answer.advantage_T, f64(0, 4, 4, 0, -6, 9, -11) / 10 / (0.675 + 1e-8) ** 0.5)


def test_remax() -> None:
    # rewards to come 1 - 1/4, 1 | 2, minus the greedy answers' 1/2 and 3
    given = replace(batch([[NAN, -0.25, NAN, 1.0], [NAN, 2.0]], [0, 1]), baseline_B=f64(0.5, 3.0))
    answer = estimate("remax", given, gamma=0.5)
    same(answer.return_T, f64(0, 0.75, 0, 1, 0, 2))
    same(answer.advantage_T, f64(0, 0.25, 0, 0.5, 0, -1))


def test_opo() -> None:
    # group 0: lengths 1 and 3, rewards 1 and 0: baseline (1 * 1 + 3 * 0) / 4; group 1 is alone
    given = batch([[NAN, 1.0], [NAN, 0.0, 0.0, NAN, 0.0], [NAN, 0.5, 0.25]], [0, 0, 1])
    same(estimate("opo", given).advantage_T, f64(0, 0.75, 0, -0.25, -0.25, 0, -0.25, 0, 0, 0))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.3], [0.3, 0.3, 0.3]])
def test_one_token_or_equal_rewards_give_finite_numbers(name: str, rewards: list[float]) -> None:
    given = outcomes(rewards, [0] * len(rewards))
    given = replace(given, value_T=torch.full_like(given.reward_T, 0.1), baseline_B=torch.ones(len(rewards)))
    advantage_T = estimate(name, given).advantage_T
    assert advantage_T.isfinite().all() and advantage_T.dtype == torch.float64 and advantage_T.abs().max() < 1


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_token_at_all(name: str) -> None:
    given = AdvantageInput(f64(), f64().bool(), f64().long(), f64().long(), value_T=f64(), baseline_B=f64())
    assert estimate(name, given).advantage_T.shape == (0,)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline", "gae"])
def test_equal_advantages_are_whitened_or_divided_to_zero(name: str) -> None:
    given = outcomes([1.0, 1.0], [0, 0])
    assert not estimate(name, replace(given, value_T=torch.zeros_like(given.reward_T))).advantage_T.any()


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="unknown advantage scale 'std'; known: group_std, none, batch_std"):
        AdvantageSettings(scale="std")
    with pytest.raises(ValueError, match="gamma is 1.5: give a number from 0 to 1"):
        AdvantageSettings(gamma=1.5)
    with pytest.raises(ValueError, match="lam is nan"):
        AdvantageSettings(lam=NAN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_T": f64(1.0)}, r"value_T has shape \(1,\), reward_T \(4,\): give both the same \[T\]"),
        ({"baseline_B": f64(1.0, 2.0, 3.0)}, r"baseline_B has shape \(3,\), group_B \(2,\)"),
        ({"mask_T": torch.ones(4)}, "mask_T is torch.float32: give a bool mask"),
        ({"reward_T": torch.ones(4, dtype=torch.int64)}, "reward_T is torch.int64: give it as floats"),
        ({"row_T": torch.zeros(4, dtype=torch.int32)}, "row_T is torch.int32: give int64"),
        ({"row_T": torch.tensor([0, 1, 0, 1])}, "row_T decreases"),
        ({"row_T": torch.tensor([0, 0, 2, 2])}, r"outside 0\.\.1"),
        ({"group_B": torch.tensor([0, -1])}, "group_B has a negative number"),
        ({"chain_T": torch.tensor([True, True, True, False])}, "chain_T leaves out a policy token"),
    ],
)
def test_input_that_does_not_fit_together(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(outcomes([1.0, 2.0], [0, 0]), **change)


def test_what_an_estimator_cannot_do_without() -> None:
    one = outcomes([1.0], [0])
    with pytest.raises(ValueError, match="at least two trajectories"):
        estimate("reinforce", one, scale="batch_std")
    with pytest.raises(ValueError, match="gae needs value_T"):
        estimate("gae", one)
    with pytest.raises(ValueError, match="remax needs baseline_B"):
        estimate("remax", one)
    with pytest.raises(
        KeyError, match="unknown advantage estimator 'gae2'; known: gae, grpo, grpo_turns, opo, reinforce"
    ):
        ADVANTAGES["gae2"]


def gae(given: AdvantageInput, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    return ADVANTAGES["gae"](given, AdvantageSettings(gamma=gamma, lam=lam))


# prompt token, policy, environment, policy
ONE_ROW = AdvantageInput(
    reward_T=f64(NAN, 0.0, NAN, 1.0),
    mask_T=torch.tensor([False, True, False, True]),
    row_T=torch.zeros(4, dtype=torch.int64),
    group_B=torch.zeros(1, dtype=torch.int64),
    value_T=f64(NAN, 0.5, NAN, 0.25),
)


def test_two_policy_tokens_with_one_of_the_environment_between() -> None:
    # gamma = lam = 1/2. delta: 0 + 1/2 * 1/4 - 1/2 = -3/8; 1 - 1/4 = 3/4. A: -3/8 + 1/4 * 3/4 = -3/16; 3/4
    # mean 9/32, differences -15/32 and 15/32, unbiased variance 2 * (15/32)^2
    answer = gae(ONE_ROW, 0.5, 0.5)
    same(answer.return_T, f64(0, -3 / 16 + 1 / 2, 0, 1))
    same(answer.advantage_T, f64(0, -15 / 32, 0, 15 / 32) / (2 * (15 / 32) ** 2 + 1e-8) ** 0.5)


def test_chain_over_all_response_tokens() -> None:
    # V = 1/2, 3/4, 1/4. delta: 1/2 * 3/4 - 1/2 = -1/8; 1/2 * 1/4 - 3/4 = -5/8; 1 - 1/4 = 3/4
    # A: 3/4; -5/8 + 3/16 = -7/16; -1/8 - 7/64 = -15/64. Mean (48 - 28 - 15) / 64 / 3 = 5/192,
    # differences (144, -84 , -45) / 192 - 5/192 = 139/192, -89/192, -50/192
    chain_T = torch.tensor([False, True, True, True])
    answer = gae(replace(ONE_ROW, value_T=f64(NAN, 0.5, 0.75, 0.25), chain_T=chain_T), 0.5, 0.5)
    same(answer.return_T, f64(0, -15 / 64 + 1 / 2, -7 / 16 + 3 / 4, 1))
    variance = (139**2 + 89**2 + 50**2) / 192**2 / 2
    same(answer.advantage_T, f64(0, -50, -89, 139) / 192 / (variance + 1e-8) ** 0.5)


def test_a_chain_over_policy_tokens_is_the_default() -> None:
    plain, chained = gae(ONE_ROW, 0.9, 0.8), gae(replace(ONE_ROW, chain_T=ONE_ROW.mask_T), 0.9, 0.8)
    assert torch.equal(plain.advantage_T, chained.advantage_T)


def random_batch(seed: int, lengths: tuple[int, ...] = (7, 1, 12, 4)) -> AdvantageInput:
    """Policy and environment tokens mixed; rewards and values anywhere, NaN at environment tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.6
    reward_T, value_T = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    hidden = {"reward_T": reward_T.masked_fill(~mask_T, NAN), "value_T": value_T.masked_fill(~mask_T, NAN)}
    return AdvantageInput(mask_T=mask_T, row_T=row_T, group_B=torch.zeros(len(lengths), dtype=torch.int64), **hidden)


def double_sum(given: AdvantageInput, gamma: float, lam: float) -> dict[int, float]:
    """A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}) over policy tokens, as eq. 16 is written."""
    assert given.value_T is not None
    answer = {}
    for row in range(len(given.group_B)):
        chain = torch.nonzero(given.mask_T & (given.row_T == row)).flatten().tolist()
        reward = [float(given.reward_T[t]) for t in chain]
        value = [float(given.value_T[t]) for t in chain] + [0.0]
        for start, token in enumerate(chain):
            answer[token] = sum(
                (gamma * lam) ** (t - start) * (reward[t] + gamma * value[t + 1] - value[t])
                for t in range(start, len(chain))
            )
    return answer


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_double_sum(seed: int, gamma: float, lam: float) -> None:
    given = random_batch(seed)
    assert given.value_T is not None
    answer, expected = gae(given, gamma, lam), double_sum(given, gamma, lam)
    raw_N = f64(*(expected[token] for token in sorted(expected)))
    assert answer.return_T is not None
    same(answer.return_T[given.mask_T] - given.value_T[given.mask_T], raw_N)
    same(answer.advantage_T[given.mask_T], (raw_N - raw_N.mean()) / (raw_N.var() + 1e-8).sqrt())
    assert not answer.advantage_T[~given.mask_T].any() and not answer.return_T[~given.mask_T].any()
