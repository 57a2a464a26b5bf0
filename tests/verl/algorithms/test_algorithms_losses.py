"""Policy loss, KL, entropy, masked sums and the anchor's rule: numbers by hand, gradients by autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.anchor import follow
from verl.algorithms.entropy import entropy
from verl.algorithms.kl import EXACT_KL, SAMPLED_KL, full_reverse
from verl.algorithms.masking import masked_mean, masked_sum
from verl.algorithms.policy_loss import POLICY_LOSSES, ppo_clip
from verl.algorithms.registry import Registry


def f64(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_ppo_clip_by_hand() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5, 1.1 with low 0.2, high 0.28
    old_T = f64(-1.0, -1.0, -1.0, -1.0, -1.0)
    new_T = old_T + f64(1.5, 0.5, 1.5, 0.5, 1.1).log()
    new_T.requires_grad_()
    advantage_T = f64(2.0, 2.0, -2.0, -2.0, 3.0)
    loss_T, clipped_T = POLICY_LOSSES["ppo"](new_T, old_T, advantage_T, 0.2, 0.28)
    torch.testing.assert_close(loss_T, f64(-2.56, -1.0, 3.0, 1.6, -3.3), atol=1e-12, rtol=0)
    assert clipped_T.tolist() == [True, False, False, True, False]
    loss_T.sum().backward()
    # unclipped: d(-A rho)/dl = -A rho; clipped: 0
    torch.testing.assert_close(new_T.grad, f64(0.0, -1.0, 3.0, 0.0, -3.3), atol=1e-12, rtol=0)


def test_ppo_clip_gives_gradient_to_the_policy_only() -> None:
    tensors = [f64(-1.0, grad=True) for _ in range(3)]
    ppo_clip(*tensors).loss_T.sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is None and tensors[2].grad is None


@pytest.mark.parametrize(
    ("names", "values", "gradients"),
    [
        # d = log 2 and d = -log 2: w = 1/2 and 2
        (("kl", "k1"), (math.log(2), -math.log(2)), (1.0, 1.0)),
        (("abs",), (math.log(2), math.log(2)), (1.0, -1.0)),
        (("mse", "k2"), (math.log(2) ** 2 / 2, math.log(2) ** 2 / 2), (math.log(2), -math.log(2))),
        (("low_var_kl", "k3"), (math.log(2) - 0.5, 1 - math.log(2)), (0.5, -1.0)),
    ],
)
def test_sampled_kl_by_hand(
    names: tuple[str, ...], values: tuple[float, float], gradients: tuple[float, float]
) -> None:
    for name in names:
        log_prob_T, reference_T = f64(-1.0, -2.0, grad=True), f64(-1.0 - math.log(2), -2.0 + math.log(2), grad=True)
        kl_T = SAMPLED_KL[name](log_prob_T, reference_T)
        torch.testing.assert_close(kl_T, f64(*values), atol=1e-12, rtol=0)
        kl_T.sum().backward()
        torch.testing.assert_close(log_prob_T.grad, f64(*gradients), atol=1e-12, rtol=0)
        assert reference_T.grad is None


def test_k3_is_bounded() -> None:
    kl_T = SAMPLED_KL["k3"](f64(-1000.0, 0.0), f64(0.0, -1000.0))
    assert kl_T.tolist() == [10.0, 10.0]


def test_expected_gradients_of_the_estimators() -> None:
    """Under p: k1's is zero, k2's is that of KL(p || q), k3's that of KL(q || p); all by enumeration."""
    torch.manual_seed(0)
    logits_V = (0.5 * torch.randn(5, dtype=torch.float64)).requires_grad_()  # ratios stay inside k3's bounds
    log_q_V = (0.5 * torch.randn(5, dtype=torch.float64)).log_softmax(0)

    def expected(name: str) -> torch.Tensor:
        log_p_V = logits_V.log_softmax(0)
        return torch.autograd.grad((log_p_V.exp().detach() * SAMPLED_KL[name](log_p_V, log_q_V)).sum(), logits_V)[0]

    log_p_V = logits_V.log_softmax(0)
    reverse = torch.autograd.grad((log_p_V.exp() * (log_p_V - log_q_V)).sum(), logits_V)[0]
    forward = torch.autograd.grad((log_q_V.exp() * (log_q_V - logits_V.log_softmax(0))).sum(), logits_V)[0]
    torch.testing.assert_close(expected("k1"), torch.zeros_like(reverse), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected("k2"), reverse, atol=1e-12, rtol=0)
    torch.testing.assert_close(expected("k3"), forward, atol=1e-12, rtol=0)


def test_full_reverse_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 log(3/2) + 1/4 log(1/2)
    logits_TV = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64, requires_grad=True)
    reference_TV = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    kl_T = EXACT_KL["full_reverse"](logits_TV, reference_TV)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    torch.testing.assert_close(kl_T, f64(expected), atol=1e-12, rtol=0)
    kl_T.sum().backward()
    # d KL / d z_v = p_v (log p_v - log q_v - KL)
    gradient = [[0.75 * (math.log(1.5) - expected), 0.25 * (math.log(0.5) - expected)]]
    torch.testing.assert_close(logits_TV.grad, torch.tensor(gradient, dtype=torch.float64), atol=1e-12, rtol=0)
    assert reference_TV.grad is None


def test_full_reverse_gradient_by_finite_differences() -> None:
    torch.manual_seed(0)
    logits_TV = (3 * torch.randn(4, 7, dtype=torch.float64)).requires_grad_()
    reference_TV = 3 * torch.randn(4, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: full_reverse(z, reference_TV), (logits_TV,))
    assert not full_reverse(logits_TV, logits_TV + 5.0).abs().max() > 1e-12
    assert (full_reverse(logits_TV, reference_TV) > 0).all()


def test_entropy_by_hand() -> None:
    logits_TV = torch.tensor([[math.log(3.0), 0.0], [4.0, 4.0]], dtype=torch.float64, requires_grad=True)
    expected = f64(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2.0))
    torch.testing.assert_close(entropy(logits_TV), expected, atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(entropy, (logits_TV,))


def test_masked_sum_keeps_what_is_masked_out_of_value_and_gradient() -> None:
    value_T = f64(1.0, float("nan"), 3.0, float("inf"), grad=True)
    mask_T = torch.tensor([True, False, True, False])
    total = masked_sum(value_T, mask_T, 8.0)
    assert total.item() == 0.5
    total.backward()
    assert value_T.grad is not None and value_T.grad.tolist() == [0.125, 0.0, 0.125, 0.0]
    assert masked_mean(value_T, mask_T).item() == 2.0
    with pytest.raises(ValueError, match="a mean over no token"):
        masked_mean(value_T, torch.zeros(4, dtype=torch.bool))


def test_anchor_follows() -> None:
    anchor = [f64(1.0, 2.0), f64(10.0)]
    policy = [f64(3.0, 2.0), f64(0.0)]
    follow(anchor, policy, 0.9)
    torch.testing.assert_close(anchor[0], f64(1.2, 2.0), atol=1e-12, rtol=0)
    torch.testing.assert_close(anchor[1], f64(9.0), atol=1e-12, rtol=0)
    follow(anchor, policy, 1.0)
    assert anchor[1].item() == pytest.approx(9.0)
    follow(anchor, policy, 0.0)
    assert torch.equal(anchor[0], policy[0]) and torch.equal(anchor[1], policy[1])


def test_an_anchor_equal_to_the_policy_does_not_move_by_a_bit() -> None:
    weights = [torch.randn(1000)]
    anchor = [weights[0].clone()]
    follow(anchor, weights, 0.937)
    assert torch.equal(anchor[0], weights[0])


def test_anchor_rejects_what_is_no_average() -> None:
    with pytest.raises(ValueError, match="tau is 1.5"):
        follow([f64(1.0)], [f64(1.0)], 1.5)
    with pytest.raises(ValueError, match="anchor has 1 tensors, policy has 0"):
        follow([f64(1.0)], [], 0.5)


def test_a_name_is_registered_once() -> None:
    registry: Registry = Registry("thing")
    registry.register("a", "b")(len)
    assert registry["a"] is len and set(registry) == {"a", "b"} and "c" not in registry
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a")(max)
    with pytest.raises(KeyError, match="unknown thing 'c'; known: a, b"):
        registry["c"]
