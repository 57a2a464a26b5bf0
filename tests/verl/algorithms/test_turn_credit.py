"""`grpo_turns`: its gradient is that of the expected reward, where the policy decides when to stop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from exact_numbers import f64
from stopping_process import StoppingProcess
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings


def registered(name: str, scale: str = "none"):
    return lambda given: ADVANTAGES[name](given, AdvantageSettings(scale=scale)).advantage_T


def among_those_that_reached_it(given: AdvantageInput) -> Tensor:
    """The return from turn k on, minus its mean over those of the group that have a turn k, itself among them."""
    assert given.turn_T is not None
    key = given.group_B[given.row_T] * 8 + given.turn_T
    size = int(key.max()) + 1
    end_T = torch.bincount(given.row_T).cumsum(0)[given.row_T] - 1
    total_T = given.reward_T.cumsum(0)
    to_go_T = total_T[end_T] - total_T + given.reward_T
    mean = to_go_T.new_zeros(size).index_add(0, key, to_go_T) / torch.bincount(key, minlength=size)
    return to_go_T - mean[key]


@pytest.fixture(scope="module")
def process() -> StoppingProcess:
    return StoppingProcess(seed=0)


def test_it_has_all_episodes(process: StoppingProcess) -> None:
    """2 that stop in the first turn, 4 x 2 in the second; 16 histories with 6 ways to end in the third."""
    assert len(process.episodes) == 2 + 8 + 96
    assert abs(float(process.probabilities().detach().sum()) - 1) < 1e-14


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_expected_gradient_is_the_true_one(process: StoppingProcess, size: int, at_end: bool) -> None:
    found, _ = process.estimated_gradient(size, registered("grpo_turns"), at_end)
    assert float((found - process.true_gradient()).abs().max()) < 1e-12


def test_others_are_biased_or_vary_more(process: StoppingProcess) -> None:
    """The figures of docs/turn_credit.md: relative error, error of the direction (the sine of the angle), variance."""
    estimators = {
        "grpo_turns": registered("grpo_turns"),
        "rloo": registered("rloo"),
        "among those that reached it": among_those_that_reached_it,
        "grpo": registered("grpo", "group_std"),
    }
    true, found = process.true_gradient(), dict[str, tuple[float, float, float]]()
    for name, estimator in estimators.items():
        mean, variance = process.estimated_gradient(2, estimator)
        cosine = float(torch.cosine_similarity(mean.flatten(), true.flatten(), 0))
        found[name] = (float((mean - true).norm() / true.norm()), math.sqrt(max(0, 1 - cosine**2)), variance)
    rounded = {name: tuple(round(value, 3) for value in values) for name, values in found.items()}
    assert rounded == {
        "grpo_turns": (0, 0, 1.913),
        "rloo": (0, 0, 2.651),
        "among those that reached it": (0.508, 0.035, 0.461),
        "grpo": (0.728, 0.112, 0.318),
    }


def test_by_hand() -> None:
    """A group of three with 2, 1 and 3 turns; the second turn of the first has two tokens, and its reward at the last.

    Returns from each turn on: (3, 2, 2), (4, 4, 4), (0, 1, -1). Less half of the others' sum: 3 - 2, 2 - 2.5;
    4 - 1.5; 0 - 3.5, 1 - 3, -1 - 3.
    """
    given = AdvantageInput(
        f64(1, 0, 9, 2, 4, -1, 2, -1, 5),
        torch.tensor([True, True, False, True, True, True, True, True, True]),
        torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3]),
        torch.tensor([0, 0, 0, 1]),
        turn_T=torch.tensor([0, 1, 0, 1, 0, 0, 1, 2, 0]),
    )
    expected = f64(1, -0.5, 0, -0.5, 2.5, -3.5, -2, -4, 0)
    torch.testing.assert_close(registered("grpo_turns")(given), expected, rtol=0, atol=1e-12)
    # s: the whole returns 3, 4, 0 less their mean
    std = float(f64(3, 4, 0).std()) + 1e-6
    torch.testing.assert_close(registered("grpo_turns", "batch_std")(given), expected / std, rtol=0, atol=1e-12)
    assert torch.equal(registered("grpo_turns", "group_std")(given), registered("grpo_turns")(given))
    whole = registered("grpo_turns")(replace(given, turn_T=None))
    torch.testing.assert_close(whole, registered("rloo")(given), rtol=0, atol=1e-12)
