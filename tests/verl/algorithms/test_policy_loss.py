"""What a loss is made of: policy losses, the value loss, entropy, weights of tokens; by hand and by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from exact_numbers import f64
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.aggregation import LOSS_AGGREGATIONS, loss_weights
from verl.algorithms.log_probs import entropy
from verl.algorithms.policy_loss import POLICY_LOSSES, Clip
from verl.algorithms.value_loss import value_loss

NAMES = ("ppo", "gspo", "cispo", "reinforce")


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def with_ratios(*ratios: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (with gradient) and old log-probs, so that exp(l - l_old) are the given ratios."""
    old_T = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return (old_T + f64(*ratios).log()).requires_grad_(), old_T


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_ppo_clip_by_hand() -> None:
    # low 0.2, high 0.28: only ratios above 1.28 with A > 0 and below 0.8 with A < 0 are clipped
    log_prob_T, old_T = with_ratios(1.5, 0.5, 1.5, 0.5, 1.1)
    advantage_T = f64(2.0, 2.0, -2.0, -2.0, 3.0)
    loss_T, clipped_T = POLICY_LOSSES["ppo"](log_prob_T, old_T, advantage_T, rows(0, 0, 0, 0, 0), Clip(0.2, 0.28))
    close(loss_T, f64(-2.56, -1.0, 3.0, 1.6, -3.3))
    assert clipped_T.tolist() == [True, False, False, True, False]
    loss_T.sum().backward()
    # unclipped: d(-A rho)/dl = -A rho; clipped: 0
    close(log_prob_T.grad, f64(0.0, -1.0, 3.0, 0.0, -3.3))


def test_ppo_dual_clip_by_hand() -> None:
    # c = 3: with A = -2 the loss is at most 2 * 3 = 6, so ratio 5 gives 6 instead of 10 and no gradient; ratio 2.5
    # stays 5; ratio 0.5 is held at 0.8 by the lower bound. A = 2 is untouched: ratio 5 is clipped to 1.2
    log_prob_T, old_T = with_ratios(5.0, 2.5, 0.5, 5.0)
    advantage_T = f64(-2.0, -2.0, -2.0, 2.0)
    loss_T, clipped_T = POLICY_LOSSES["ppo"](log_prob_T, old_T, advantage_T, rows(0, 0, 0, 0), Clip(dual=3.0))
    close(loss_T, f64(6.0, 5.0, 1.6, -2.4))
    assert clipped_T.tolist() == [True, False, True, True]
    loss_T.sum().backward()
    close(log_prob_T.grad, f64(0.0, 5.0, 0.0, 0.0))


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_dual_bound_of_at_most_one_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="dual clip is 1.0"):
        POLICY_LOSSES[name](f64(-1.0), f64(-1.0), f64(1.0), rows(0), Clip(dual=1.0))


def test_gspo_by_hand() -> None:
    # row 0 (tokens 0, 2): ratios 2 and 1/2, so s = 1: nothing is clipped although both tokens are far off
    # row 1 (tokens 1, 3, 4): ratios 4, 1, 2, so s = 8^(1/3) = 2, clipped to 1.2 for A = 3: loss -3.6
    # row 2 (token 5): s = 2 with A = -1 is not clipped: loss 2
    log_prob_T, old_T = with_ratios(2.0, 4.0, 0.5, 1.0, 2.0, 2.0)
    advantage_T = f64(5.0, 3.0, 5.0, 3.0, 3.0, -1.0)
    loss_T, clipped_T = POLICY_LOSSES["gspo"](log_prob_T, old_T, advantage_T, rows(0, 1, 0, 1, 1, 2), Clip())
    close(loss_T, f64(-5.0, -3.6, -5.0, -3.6, -3.6, 2.0))
    assert clipped_T.tolist() == [False, True, False, True, True, False]
    loss_T.sum().backward()
    # per token -A s where not clipped, else 0
    close(log_prob_T.grad, f64(-5.0, 0.0, -5.0, 0.0, 0.0, 2.0))


@pytest.mark.parametrize("seed", range(2))
def test_gspo_has_the_value_and_gradient_of_the_sequence_objective(seed: int) -> None:
    """The mean over each row's tokens, against min(s A, clip(s) A) of the row's length-normalised ratio s."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 4, 7, 3]
    row_T = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    old_T = -torch.rand(15, generator=generator, dtype=torch.float64)
    log_prob_T = (old_T + 0.3 * torch.randn(15, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage_B = torch.randn(4, generator=generator, dtype=torch.float64)

    loss_T = POLICY_LOSSES["gspo"](log_prob_T, old_T, advantage_B[row_T], row_T, Clip(0.05, 0.1)).loss_T
    loss = torch.stack([part.mean() for part in loss_T.split(lengths)]).sum()

    sequence = f64(0.0)
    for new, old, advantage in zip(log_prob_T.split(lengths), old_T.split(lengths), advantage_B, strict=True):
        s = (new.sum() - old.sum()).div(len(new)).exp()
        sequence = sequence - torch.minimum(s * advantage, s.clamp(0.95, 1.1) * advantage)
    close(loss.reshape(1), sequence)
    close(torch.autograd.grad(loss, log_prob_T)[0], torch.autograd.grad(sequence, log_prob_T)[0])


def test_cispo_by_hand() -> None:
    # l = log rho - 1; weights: 1.5 -> 1.28, 0.5 -> 0.8, 1.1 stays. Clipped tokens keep their gradient -weight A
    log_prob_T, old_T = with_ratios(1.5, 0.5, 1.1)
    loss_T, clipped_T = POLICY_LOSSES["cispo"](log_prob_T, old_T, f64(2.0, -2.0, 3.0), rows(0, 0, 0), Clip(0.2, 0.28))
    close(loss_T, f64(-2.56 * (math.log(1.5) - 1), 1.6 * (math.log(0.5) - 1), -3.3 * (math.log(1.1) - 1)))
    assert clipped_T.tolist() == [True, True, False]
    loss_T.sum().backward()
    close(log_prob_T.grad, f64(-2.56, 1.6, -3.3))


def test_cispo_without_a_lower_bound() -> None:
    log_prob_T, old_T = with_ratios(0.01)
    loss_T, clipped_T = POLICY_LOSSES["cispo"](log_prob_T, old_T, f64(2.0), rows(0), Clip(low=1.0))
    loss_T.sum().backward()
    close(log_prob_T.grad, f64(-0.02))
    assert not clipped_T.any()


def test_reinforce_by_hand() -> None:
    # -A l; the old log-probs play no part
    log_prob_T = f64(-0.5, -2.0, grad=True)
    loss_T, clipped_T = POLICY_LOSSES["reinforce"](log_prob_T, f64(-9.0, 0.0), f64(3.0, -1.0), rows(0, 1), Clip())
    close(loss_T, f64(1.5, -2.0))
    assert clipped_T.tolist() == [False, False]
    loss_T.sum().backward()
    close(log_prob_T.grad, f64(-3.0, 1.0))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    log_prob_T = f64(-0.3, -1.0, -2.0, grad=True)
    advantage_T = f64(2.0, 2.0, -1.0)
    policy = POLICY_LOSSES[name](log_prob_T, log_prob_T.detach().clone(), advantage_T, rows(0, 0, 1), Clip())
    policy.loss_T.sum().backward()
    close(log_prob_T.grad, -advantage_T)
    assert policy.clipped_T.dtype == torch.bool and not policy.clipped_T.any()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_goes_to_the_policy_only(name: str) -> None:
    log_prob_T, old_T, advantage_T = (f64(-1.0, -2.0, grad=True) for _ in range(3))
    POLICY_LOSSES[name](log_prob_T, old_T, advantage_T, rows(0, 0), Clip()).loss_T.sum().backward()
    assert log_prob_T.grad is not None and log_prob_T.grad.all()
    assert old_T.grad is None and advantage_T.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_all_numbers_stay_finite(name: str) -> None:
    """exp(1000) is infinite; the log ratio is held at +-20. In ppo and gspo it then has no gradient."""
    log_prob_T = torch.tensor([0.0, -1000.0], requires_grad=True)
    loss_T = POLICY_LOSSES[name](log_prob_T, torch.tensor([-1000.0, 0.0]), -torch.ones(2), rows(0, 1), Clip()).loss_T
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and log_prob_T.grad is not None and log_prob_T.grad.isfinite().all()
    if name in ("ppo", "gspo"):
        assert loss_T[0].item() == pytest.approx(math.exp(20.0))
        assert not log_prob_T.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_no_token_gives_no_loss(name: str) -> None:
    empty = torch.zeros(0)
    assert POLICY_LOSSES[name](empty, empty, empty, rows(), Clip()).loss_T.shape == (0,)


@given(st.sampled_from(NAMES), st.integers(0, 2**31), st.integers(1, 12))
def test_order_and_names_of_rows_do_not_matter(name: str, seed: int, num_tokens: int) -> None:
    """Tokens in any order, with rows called by any numbers, keep their losses and bounds."""
    generator = torch.Generator().manual_seed(seed)
    log_prob_T, old_T = -3 * torch.rand(2, num_tokens, generator=generator, dtype=torch.float64)
    row_T = torch.randint(3, (num_tokens,), generator=generator)
    advantage_T = torch.randn(3, generator=generator, dtype=torch.float64)[row_T]
    order = torch.randperm(num_tokens, generator=generator)
    renamed_T = torch.tensor([7, 10**6, 0])[row_T]
    loss_T, clipped_T = POLICY_LOSSES[name](log_prob_T, old_T, advantage_T, row_T, Clip(dual=2.0))
    moved = POLICY_LOSSES[name](log_prob_T[order], old_T[order], advantage_T[order], renamed_T[order], Clip(dual=2.0))
    close(moved.loss_T, loss_T[order])
    assert torch.equal(moved.clipped_T, clipped_T[order])


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


def test_value_loss_by_hand() -> None:
    # old value 0, clip 1/2. V, R:
    #   1, 2     clipped to 1/2, further from R: (3/2)^2 / 2 = 9/8, no gradient
    #   1, -1    clipped to 1/2, nearer to R:    2^2 / 2 = 2, gradient V - R = 2
    #   1/4, 2   not clipped:                    (7/4)^2 / 2 = 49/32, gradient -7/4
    #   -1, -3   clipped to -1/2, further:       (5/2)^2 / 2 = 25/8, no gradient
    value_T = f64(1.0, 1.0, 0.25, -1.0, grad=True)
    answer = value_loss(value_T, f64(0, 0, 0, 0), f64(2.0, -1.0, 2.0, -3.0), 0.5)
    torch.testing.assert_close(answer.loss_T, f64(9 / 8, 2, 49 / 32, 25 / 8), atol=1e-12, rtol=0)
    assert answer.clipped_T.tolist() == [True, False, False, True]
    answer.loss_T.sum().backward()
    torch.testing.assert_close(value_T.grad, f64(0, 2, -7 / 4, 0), atol=1e-12, rtol=0)


def test_gradient_goes_to_the_value_only() -> None:
    tensors = [f64(0.5, grad=True) for _ in range(3)]
    value_loss(tensors[0], tensors[1], tensors[2], 0.5).loss_T.sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is None and tensors[2].grad is None


def test_an_infinite_range_is_the_plain_squared_error() -> None:
    answer = value_loss(f64(10.0, -10.0), f64(0.0, 0.0), f64(12.0, 0.0), math.inf)
    assert answer.loss_T.tolist() == [2.0, 50.0] and not answer.clipped_T.any()


@pytest.mark.parametrize("clip", [0.0, -0.5, math.nan])
def test_a_range_must_be_positive(clip: float) -> None:
    with pytest.raises(ValueError, match="clip range of the value loss is"):
        value_loss(f64(1.0), f64(1.0), f64(1.0), clip)


def test_entropy_by_hand() -> None:
    # p = (3/4, 1/4): H = log 4 - 3/4 log 3, and d H / d z_0 = -p_0 (log p_0 + H) = -3/16 log 3
    # uniform: log 2, and no gradient
    logits_TV = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    log_p_TV = logits_TV.log_softmax(-1)
    entropy_T = entropy(log_p_TV)
    expected_T = torch.tensor([math.log(4) - 0.75 * math.log(3), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(entropy_T, expected_T, atol=1e-14, rtol=0)
    slope = 3 / 16 * math.log(3)
    expected_TV = torch.tensor([[-slope, slope], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(entropy_T.sum(), logits_TV)[0], expected_TV, atol=1e-14, rtol=0)
