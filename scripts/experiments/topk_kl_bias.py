"""How far the expected gradient of a KL estimate is from that of the KL, and how much one token's gradient scatters.

    .venv/bin/python scripts/experiments/topk_kl_bias.py > docs/results/topk_kl_bias.txt

The reference is q_v ~ rank^-a (Zipf), the policy p ~ q exp(noise e_v) with e_v standard normal. The token is drawn from
p. Nothing is sampled: the gradient for token y with respect to the logits is h + c_y (e_y - p), where h is the head's
gradient and c_y the slope of the sampled part, both taken from the shipped functions by autograd, so that

    mean = h + p c - (p . c) p           variance = sum_y p_y c_y^2 |e_y - p|^2 - |p c - (p . c) p|^2

are sums over the vocabulary. Every figure is a share of the norm of the true gradient; the median over the draws of the
noise is printed. docs/topk_kl.md explains the result.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from verl.algorithms.kl import EXACT_KL, SAMPLED_KL, TOPK_KL

SHOWN_ESTIMATORS = {"full_reverse": ("k1", "k2", "k3", "k3plusplus", "k4"), "full_forward": ("k3", "k5")}
TITLES = {"full_reverse": "Reverse: KL(p || q)", "full_forward": "Forward: KL(q || p)"}


class Pair(NamedTuple):
    """Log-probs of policy and reference over the vocabulary, float64."""

    log_p_V: torch.Tensor
    log_q_V: torch.Tensor


class Row(NamedTuple):
    """Head mass, sd per token, bias as published and as corrected, both without the tail; nan: does not apply."""

    mass: float
    deviation: float
    published: float
    corrected: float
    truncated_published: float
    truncated_corrected: float


def draw_pair(vocabulary: int, exponent: float, noise: float, seed: int) -> Pair:
    """Zipf reference and its perturbed policy."""
    generator = torch.Generator().manual_seed(seed)
    log_q_V = (-exponent * torch.arange(1, vocabulary + 1, dtype=torch.float64).log()).log_softmax(0)
    perturbation_V = noise * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    return Pair((log_q_V + perturbation_V).log_softmax(0), log_q_V)


def true_gradient(name: str, pair: Pair) -> tuple[float, torch.Tensor]:
    """The exact KL and its gradient [V]."""
    log_p_1V, log_q_1V = pair.log_p_V[None], pair.log_q_V[None]
    kl_1 = EXACT_KL[name].value(log_p_1V, log_q_1V)
    return kl_1.item(), EXACT_KL[name].logit_gradient(log_p_1V, log_q_1V, kl_1)[0]


def to_logits(slope_V: torch.Tensor, pair: Pair) -> torch.Tensor:
    """Gradient with respect to the logits of sum_v slope_v log p_v."""
    return slope_V - slope_V.sum() * pair.log_p_V.exp()


def head_gradient(name: str, pair: Pair, head_k: torch.Tensor, gradient: str) -> torch.Tensor:
    """Gradient [V] of the Top-k KL without its tail."""
    log_p_1k = pair.log_p_V[head_k][None].requires_grad_()
    zero_1 = torch.zeros(1, dtype=torch.float64)
    inside_1 = torch.ones(1, dtype=torch.bool)
    kl_1 = TOPK_KL[name](log_p_1k, pair.log_q_V[head_k][None], zero_1, zero_1, inside_1, gradient=gradient, tail=False)
    slope_1k = torch.autograd.grad(kl_1.sum(), log_p_1k)[0]
    return to_logits(torch.zeros_like(pair.log_p_V).scatter(0, head_k, slope_1k[0]), pair)


def slopes(estimate: Callable[[torch.Tensor], torch.Tensor], pair: Pair) -> torch.Tensor:
    """c_y for every token y: derivative of the estimate by the log-prob of the sampled token."""
    log_prob_V = pair.log_p_V.clone().requires_grad_()
    return torch.autograd.grad(estimate(log_prob_V).sum(), log_prob_V)[0]


def tail_slopes(name: str, pair: Pair, head_k: torch.Tensor) -> torch.Tensor:
    """c_y of the Top-k KL's tail, zero inside the head."""
    in_S_V = torch.zeros_like(pair.log_p_V, dtype=torch.bool).index_fill(0, head_k, True)
    none_V0 = pair.log_p_V.new_zeros(len(in_S_V), 0)
    return slopes(lambda log_prob_V: TOPK_KL[name](none_V0, none_V0, log_prob_V, pair.log_q_V, in_S_V), pair)


def mean_and_deviation(slope_V: torch.Tensor, pair: Pair) -> tuple[torch.Tensor, float]:
    """Mean [V] and standard deviation of slope_y (e_y - p) for y drawn from p."""
    p_V = pair.log_p_V.exp()
    mean_V = to_logits(p_V * slope_V, pair)
    distance_V = 1 - 2 * p_V + p_V.square().sum()
    variance = (p_V * slope_V.square() * distance_V).sum() - mean_V.square().sum()
    return mean_V, max(0.0, variance.item()) ** 0.5


def topk_row(name: str, pair: Pair, k: int) -> Row:
    """The Top-k KL with the k most likely tokens of the policy (reverse) or of the reference (forward)."""
    head_k = (pair.log_p_V if name == "full_reverse" else pair.log_q_V).topk(k).indices
    _, true_V = true_gradient(name, pair)
    tail_V, deviation = mean_and_deviation(tail_slopes(name, pair, head_k), pair)
    published_V = head_gradient(name, pair, head_k, "published") - true_V
    corrected_V = head_gradient(name, pair, head_k, "corrected") - true_V
    biases = (published_V + tail_V, corrected_V + tail_V, published_V, corrected_V)
    scale = true_V.norm().item()
    mass = pair.log_p_V[head_k].exp().sum().item()
    return Row(mass, deviation / scale, *(bias_V.norm().item() / scale for bias_V in biases))


def sampled_row(name: str, pair: Pair, estimator: str) -> Row:
    """An estimator that sees the sampled token only: no head, so nothing to correct."""
    _, true_V = true_gradient(name, pair)
    slope_V = slopes(lambda log_prob_V: SAMPLED_KL[estimator](log_prob_V, pair.log_q_V), pair)
    mean_V, deviation = mean_and_deviation(slope_V, pair)
    bias = ((mean_V - true_V).norm() / true_V.norm()).item()
    return Row(math.nan, deviation / true_V.norm().item(), bias, bias, math.nan, math.nan)


def median(rows: list[Row]) -> Row:
    return Row(*torch.tensor(rows, dtype=torch.float64).median(0).values.tolist())


def cell(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value < 1e-9 else f"{value:.3g}"


def table(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of one direction."""
    yield f"{TITLES[name]}; a: exponent of q, noise: distance of p from q, mass: of p in the head, sd: of one token"
    yield ""
    yield f"{'':>38}  {'bias':^19} {'':>9}  {'bias without tail':^19}".rstrip()
    titles = ("a", "noise", "KL", "estimator", "mass", "published", "corrected", "sd", "published", "corrected")
    yield "{:>4} {:>6} {:>8} {:>10} {:>6}  {:>9} {:>9} {:>9}  {:>9} {:>9}".format(*titles)
    for exponent in args.exponents:
        for noise in args.noises:
            pairs = [draw_pair(args.vocabulary, exponent, noise, args.seed + draw) for draw in range(args.draws)]
            kl = torch.tensor([true_gradient(name, pair)[0] for pair in pairs]).median().item()
            rows = {e: median([sampled_row(name, pair, e) for pair in pairs]) for e in SHOWN_ESTIMATORS[name]}
            rows |= {f"top {k}": median([topk_row(name, pair, k) for pair in pairs]) for k in args.k}
            for label, row in rows.items():
                mass = "-" if math.isnan(row.mass) else f"{row.mass:.4f}"
                shown = (row.published, row.corrected, row.deviation, row.truncated_published, row.truncated_corrected)
                start = f"{exponent:>4g} {noise:>6g} {kl:>8.2g} {label:>10} {mass:>6}"
                yield start + "  {:>9} {:>9} {:>9}  {:>9} {:>9}".format(*map(cell, shown))
            yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Bias and scatter of KL gradients, exact over the vocabulary.")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="number of tokens")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 8, 32, 128, 1024], help="sizes of the head")
    parser.add_argument("--exponents", type=float, nargs="+", default=[1.2, 1.5, 2.0, 3.0], help="a of rank^-a")
    parser.add_argument("--noises", type=float, nargs="+", default=[0.01, 0.1, 0.5], help="sd of log p - log q")
    parser.add_argument("--draws", type=int, default=5, help="draws of the noise; the median is printed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first draw")
    args = parser.parse_args()
    if not 1 <= max(args.k) <= args.vocabulary or min(args.k) < 1:
        parser.error(f"--k has to lie between 1 and the vocabulary of {args.vocabulary}")
    print(f"vocabulary {args.vocabulary}, {args.draws} draws from seed {args.seed}, float64")
    print("bias and sd are shares of the norm of the true gradient; 0 means below 1e-9\n")
    for name in TOPK_KL:
        print("\n".join(table(name, args)))


if __name__ == "__main__":
    main()
