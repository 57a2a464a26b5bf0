"""Top-k KL by hand, at its edges and on bad input; the closed forms and the script behind docs/topk_kl.md."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from verl.algorithms.kl import SAMPLED_KL, TOPK_KL, topk_forward, topk_reverse

L = math.log(2)
# p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), S = {0}: d = (L, -L, 0), and either KL is L / 4
LOG_Q_V = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log()


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(name: str, sampled: int, head: list[int], **options: Any) -> tuple[float, torch.Tensor]:
    logits_V = vector(0.5, 0.25, 0.25).log().requires_grad_()
    log_q_V = LOG_Q_V.clone().requires_grad_()
    log_p_V = logits_V.log_softmax(0)
    in_S_T = torch.tensor([sampled in head])
    index_Tk = torch.tensor(head, dtype=torch.int64)[None]
    kl_T = TOPK_KL[name](
        log_p_V[index_Tk], log_q_V[index_Tk], log_p_V[[sampled]], log_q_V[[sampled]], in_S_T, **options
    )
    kl_T.sum().backward()
    assert kl_T.shape == (1,) and logits_V.grad is not None and log_q_V.grad is None
    return kl_T.item(), logits_V.grad


# Reverse. Head p_0 d_0 = L/2; with g = grad p_0 = 1/2 (e_0 - p) = (1/4, -1/8, -1/8), its gradient is (L + 1) g, L g
# when corrected. Tail of y = 1: value d_1 = -L, gradient -L (e_1 - p) = -L (-1/2, 3/4, -1/4).
# Forward. Head q_0 (log q_0 - log p_0) = -L/4, its gradient -1/4 (e_0 - p) = (-1/8, 1/16, 1/16), corrected: + g.
# Tail of y = 1: w = 2, value w log w = 2 L, gradient (1 - w)(e_1 - p) = (1/2, -3/4, 1/4).
G = vector(1 / 4, -1 / 8, -1 / 8)
REVERSE_TAIL, FORWARD_TAIL = -L * vector(-1 / 2, 3 / 4, -1 / 4), vector(1 / 2, -3 / 4, 1 / 4)
FORWARD_HEAD = vector(-1 / 8, 1 / 16, 1 / 16)
BY_HAND = [
    ("full_reverse", 0, "published", L / 2, (L + 1) * G),
    ("full_reverse", 0, "corrected", L / 2, L * G),
    ("full_reverse", 1, "published", -L / 2, (L + 1) * G + REVERSE_TAIL),
    ("full_reverse", 1, "corrected", -L / 2, L * G + REVERSE_TAIL),
    ("full_forward", 0, "published", -L / 4, FORWARD_HEAD),
    ("full_forward", 0, "corrected", -L / 4, FORWARD_HEAD + G),
    ("full_forward", 1, "published", 7 * L / 4, FORWARD_HEAD + FORWARD_TAIL),
    ("full_forward", 1, "corrected", 7 * L / 4, FORWARD_HEAD + G + FORWARD_TAIL),
]


@pytest.mark.parametrize(("name", "sampled", "gradient", "value", "expected_V"), BY_HAND)
def test_by_hand(name: str, sampled: int, gradient: str, value: float, expected_V: torch.Tensor) -> None:
    actual, gradient_V = value_and_gradient(name, sampled, [0], gradient=gradient)
    assert actual == pytest.approx(value, abs=1e-14)
    torch.testing.assert_close(gradient_V, expected_V, atol=1e-14, rtol=0)


def test_the_weight_multiplies_the_tail_only_and_is_a_constant() -> None:
    weight_T = vector(3.0).requires_grad_()
    actual, gradient_V = value_and_gradient("full_reverse", 1, [0], weight_T=weight_T)
    assert actual == pytest.approx(L / 2 - 3 * L, abs=1e-14)
    torch.testing.assert_close(gradient_V, L * G + 3 * REVERSE_TAIL, atol=1e-14, rtol=0)
    assert weight_T.grad is None
    actual, gradient_V = value_and_gradient("full_forward", 1, [0], weight_T=weight_T)
    assert actual == pytest.approx(-L / 4 + 6 * L, abs=1e-14)
    torch.testing.assert_close(gradient_V, FORWARD_HEAD + G + 3 * FORWARD_TAIL, atol=1e-14, rtol=0)


@pytest.mark.parametrize(("name", "value"), [("full_reverse", L / 2), ("full_forward", -L / 4)])
def test_without_the_tail_the_sampled_token_does_not_matter(name: str, value: float) -> None:
    for gradient in ("corrected", "published"):
        inside, outside = (value_and_gradient(name, y, [0], tail=False, gradient=gradient) for y in (0, 1))
        assert inside[0] == outside[0] == pytest.approx(value, abs=1e-14)
        assert torch.equal(inside[1], outside[1])


@pytest.mark.parametrize("name", TOPK_KL)
def test_at_the_reference_only_the_corrected_gradient_rests(name: str) -> None:
    """p = q is the minimum of a KL: no gradient there, with the tail or without, whatever was sampled."""
    logits_V = LOG_Q_V.clone().requires_grad_()
    log_p_V = logits_V.log_softmax(0)
    for tail in (True, False):
        for gradient, size in (("corrected", 0.0), ("published", 3 / 16)):  # |q_0 (1 - q_0)| at q_0 = 1/4
            kl_T = TOPK_KL[name](
                log_p_V[None, :1], LOG_Q_V[None, :1], log_p_V[1:2], LOG_Q_V[1:2], torch.tensor([False]),
                gradient=gradient, tail=tail,
            )  # fmt: skip
            gradient_V = torch.autograd.grad(kl_T.sum(), logits_V, retain_graph=True)[0]
            assert kl_T.item() == pytest.approx(0.0, abs=1e-14)
            assert gradient_V[0].abs().item() == pytest.approx(size, abs=1e-14)


# grad KL(p || q) = p (d - KL) = (3L/8, -5L/16, -L/16); grad KL(q || p) = p - q
@pytest.mark.parametrize("gradient", ["corrected", "published"])
@pytest.mark.parametrize(
    ("name", "expected_V"),
    [("full_reverse", vector(3 * L / 8, -5 * L / 16, -L / 16)), ("full_forward", vector(1 / 4, -1 / 4, 0.0))],
)
def test_with_the_whole_vocabulary_it_is_the_exact_kl(name: str, expected_V: torch.Tensor, gradient: str) -> None:
    actual, gradient_V = value_and_gradient(name, 2, [2, 0, 1], gradient=gradient)
    assert actual == pytest.approx(L / 4, abs=1e-14)
    torch.testing.assert_close(gradient_V, expected_V, atol=1e-14, rtol=0)


# With no head at all: k4 (value d, gradient d (e_1 - p)) and k5 (value w log w, gradient (1 - w)(e_1 - p))
@pytest.mark.parametrize("gradient", ["corrected", "published"])
@pytest.mark.parametrize(
    ("name", "value", "expected_V"), [("full_reverse", -L, REVERSE_TAIL), ("full_forward", 2 * L, FORWARD_TAIL)]
)
def test_with_no_head_it_is_the_sampled_estimator(
    name: str, value: float, expected_V: torch.Tensor, gradient: str
) -> None:
    actual, gradient_V = value_and_gradient(name, 1, [], gradient=gradient)
    assert actual == pytest.approx(value, abs=1e-14)
    torch.testing.assert_close(gradient_V, expected_V, atol=1e-14, rtol=0)


@pytest.mark.parametrize("function", [topk_reverse, topk_forward])
def test_bad_input(function: Any) -> None:
    log_p_Tk, log_prob_T, inside_T = torch.full((4, 2), -1.0), torch.full((4,), -1.0), torch.zeros(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="unknown top-k KL gradient 'exact'; use corrected or published"):
        function(log_p_Tk, log_p_Tk, log_prob_T, log_prob_T, inside_T, gradient="exact")
    with pytest.raises(ValueError, match=r"p \[4, 2\], q \[4, 1\], sampled token \[4\] do not belong together"):
        function(log_p_Tk, log_p_Tk[:, :1], log_prob_T, log_prob_T, inside_T)
    with pytest.raises(ValueError, match=r"sampled token \[1\] do not belong together"):
        function(log_p_Tk, log_p_Tk, log_prob_T[:1], log_prob_T, inside_T)


ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "experiments" / "topk_kl_bias.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("topk_kl_bias", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bias_and_deviation(gradient_VV: torch.Tensor, p_V: torch.Tensor, true_V: torch.Tensor) -> tuple[float, float]:
    """Of the gradients [sampled token, logit], as shares of the true gradient's norm."""
    mean_V = p_V @ gradient_VV
    variance = p_V @ (gradient_VV - mean_V).square().sum(-1)
    return ((mean_V - true_V).norm() / true_V.norm()).item(), (variance.sqrt() / true_V.norm()).item()


@pytest.mark.parametrize("name", TOPK_KL)
def test_the_row_of_a_topk_kl(script: ModuleType, name: str) -> None:
    pair = script.draw_pair(vocabulary=30, exponent=1.2, noise=0.5, seed=3)
    p_V = pair.log_p_V.exp()
    head_k = (pair.log_p_V if name == "full_reverse" else pair.log_q_V).topk(4).indices
    in_S_V = torch.isin(torch.arange(30), head_k)
    _, true_V = script.true_gradient(name, pair)

    def all_tokens(logits_V: torch.Tensor, gradient: str, tail: bool) -> torch.Tensor:
        log_p_V = logits_V.log_softmax(0)
        at_head = log_p_V[head_k].expand(30, -1), pair.log_q_V[head_k].expand(30, -1)
        return TOPK_KL[name](*at_head, log_p_V, pair.log_q_V, in_S_V, gradient=gradient, tail=tail)

    def gradients(gradient: str, tail: bool) -> tuple[float, float]:
        gradient_VV = torch.autograd.functional.jacobian(lambda z_V: all_tokens(z_V, gradient, tail), pair.log_p_V)
        return bias_and_deviation(gradient_VV, p_V, true_V)

    row = script.topk_row(name, pair, 4)
    assert row.mass == pytest.approx(p_V[head_k].sum().item(), abs=1e-12)
    assert gradients("published", True) == pytest.approx((row.published, row.deviation), abs=1e-10)
    assert gradients("corrected", True) == pytest.approx((row.corrected, row.deviation), abs=1e-10)
    assert gradients("published", False) == pytest.approx((row.truncated_published, 0.0), abs=1e-10)
    assert gradients("corrected", False) == pytest.approx((row.truncated_corrected, 0.0), abs=1e-10)
    assert row.published > 0.1 and row.deviation > 0.1 and row.truncated_corrected > 0.01


def test_the_row_of_a_sampled_estimator(script: ModuleType) -> None:
    pair = script.draw_pair(vocabulary=30, exponent=1.2, noise=0.5, seed=3)
    _, true_V = script.true_gradient("full_reverse", pair)
    gradient_VV = torch.autograd.functional.jacobian(
        lambda z_V: SAMPLED_KL["k3"](z_V.log_softmax(0), pair.log_q_V), pair.log_p_V
    )
    row = script.sampled_row("full_reverse", pair, "k3")
    expected = bias_and_deviation(gradient_VV, pair.log_p_V.exp(), true_V)
    assert (row.published, row.deviation) == pytest.approx(expected, abs=1e-10)


def test_the_page_quotes_the_results() -> None:
    """Each row of the page's two tables: a, noise, KL, mass, ... at k = 32; and k, mass, ... at a = 2, noise 0.1."""
    reverse = (ROOT / "docs" / "results" / "topk_kl_bias.txt").read_text().split("Forward:")[0]
    results = [line.replace("top ", "").split() for line in reverse.splitlines()]
    rows = {tuple(cells[:2]) + (cells[3],): cells for cells in results if len(cells) == 10}
    page = (ROOT / "docs" / "topk_kl.md").read_text().splitlines()
    quoted = [line.strip("| ").split(" | ") for line in page if line.startswith("| ") and line[2].isdigit()]
    by_policy = [cells for cells in quoted if len(cells) == 10]
    by_size = [cells for cells in quoted if len(cells) == 7]
    assert len(by_policy) == 12 and len(by_size) == 5
    for cells in by_policy:
        a, noise, *figures = cells
        top, k4 = rows[a, noise, "32"], rows[a, noise, "k4"]
        assert figures == [top[2], *top[4:8], k4[7], *top[8:]]
    for k, *figures in by_size:
        assert figures == rows["2", "0.1", k][4:]


def test_the_command(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--vocabulary", "50", "--k", "1", "50", "--exponents", "1.5", "--noises", "0.1", "--draws", "3"]
    command = [sys.executable, str(SCRIPT), *arguments]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    whole = [line.split() for line in answer.stdout.splitlines() if "top 50" in line]
    assert [cells[-6:] for cells in whole] == [["1.0000", "0", "0", "0", "0", "0"]] * 2
    monkeypatch.setattr(sys, "argv", command[1:])
    script.main()
    assert capsys.readouterr().out == answer.stdout, "the same each time"
    monkeypatch.setattr(sys, "argv", ["topk_kl_bias.py", "--vocabulary", "50", "--k", "51"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "--k has to lie between 1 and the vocabulary of 50" in capsys.readouterr().err
