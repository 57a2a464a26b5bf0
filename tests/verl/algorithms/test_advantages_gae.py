"""GAE: numbers by hand, the double sum it abbreviates, its derivatives, and the chain over all response tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact_numbers import NAN, f64, same

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings


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
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_double_sum(seed: int, gamma: float, lam: float) -> None:
    given = random_batch(seed)
    assert given.value_T is not None
    answer, expected = gae(given, gamma, lam), double_sum(given, gamma, lam)
    raw_N = f64(*(expected[token] for token in sorted(expected)))
    assert answer.return_T is not None
    same(answer.return_T[given.mask_T] - given.value_T[given.mask_T], raw_N)
    same(answer.advantage_T[given.mask_T], (raw_N - raw_N.mean()) / (raw_N.var() + 1e-8).sqrt())
    assert not answer.advantage_T[~given.mask_T].any() and not answer.return_T[~given.mask_T].any()


def test_a_reward_counts_for_what_came_before_it_in_its_own_row() -> None:
    # d return_0 / d r_s = (gamma lam)^(policy tokens between them): 1, 1/8, then 1/64; nothing from the second row
    mask_T = torch.tensor([True, False, True, True, True])
    reward_T = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    row_T, group_B = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 0])
    return_T = gae(AdvantageInput(reward_T, mask_T, row_T, group_B, value_T=torch.ones_like(reward_T)), 0.5, 0.25)[1]
    assert return_T is not None
    (gradient_T,) = torch.autograd.grad(return_T[0], reward_T)
    same(gradient_T, f64(1, 0, 1 / 8, 1 / 64, 0))


def test_without_discount_the_advantage_is_the_score_minus_the_value() -> None:
    # scores 2 and -1 at the last policy tokens, values 1/2, 1/4 | 3/4: A = 3/2, 7/4, -7/4
    given = AdvantageInput(
        reward_T=f64(NAN, 0.0, NAN, 2.0, NAN, -1.0),
        mask_T=torch.tensor([False, True, False, True, False, True]),
        row_T=torch.tensor([0, 0, 0, 0, 1, 1]),
        group_B=torch.tensor([0, 1]),
        value_T=f64(NAN, 0.5, NAN, 0.25, NAN, 0.75),
    )
    answer, raw_N = gae(given), f64(1.5, 1.75, -1.75)
    same(answer.return_T, f64(0, 2, 0, 2, 0, -1))
    # mean 1/2, differences 1, 5/4, -9/4, variance (16 + 25 + 81) / 16 / 2 = 61/16
    same(answer.advantage_T[given.mask_T], (raw_N - 0.5) / (61 / 16 + 1e-8) ** 0.5)


def test_rewards_outside_the_mask_count_nothing_on_a_chain() -> None:
    chain_T = torch.tensor([False, True, True, True])
    given = replace(ONE_ROW, value_T=f64(NAN, 0.5, 0.75, 0.25), chain_T=chain_T)
    with_garbage = replace(given, reward_T=f64(1e9, 0.0, -1e9, 1.0))
    assert torch.equal(gae(given, 0.9, 0.9).advantage_T, gae(with_garbage, 0.9, 0.9).advantage_T)
