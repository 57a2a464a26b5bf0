"""The script behind the table of docs/topk_kl.md: its closed forms against every token's gradient by autograd."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from verl.algorithms.kl import SAMPLED_KL, TOPK_KL

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
