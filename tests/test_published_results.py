"""The ranges that README publishes hold every run whose log is stored, and what was seen on other processors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
LOGS = ROOT / "docs" / "results"


def bands(label: str) -> list[tuple[float, float]]:
    """Of questions with one search, of those with two, of all: the lowest and the highest exact match."""
    [row] = re.findall(rf"^\| {label} \|(.*)\|$", README, re.MULTILINE)
    found = re.findall(r"([\d.]+) to ([\d.]+)", row)
    assert len(found) == 3
    return [(float(low), float(high)) for low, high in found]


@pytest.mark.parametrize(("label", "side"), [("after the warm start", 0), ("after RL", 1)])
def test_the_ranges_of_readme_hold_every_default_run(label: str, side: int) -> None:
    rows = [line for line in RESULTS.splitlines() if line.startswith("| default |")]
    assert len(rows) == 9
    for row in rows:
        scores = [float(pair[side]) for pair in re.findall(r"([\d.]+) -> ([\d.]+)", row)]
        for score, (low, high) in zip(scores, bands(label), strict=True):
            assert low <= score <= high, row


@pytest.mark.parametrize(("label", "when"), [("after the warm start", "before RL"), ("after RL", "after RL")])
def test_readme_and_the_results_publish_the_same_range(label: str, when: str) -> None:
    [(low, high)] = re.findall(rf"\| exact match {when} \| overall (\d\.\d+) to (\d\.\d+)", RESULTS)
    assert bands(label)[2] == (float(low), float(high))
    seen = re.findall(r"0\.\d{3} on another processor", RESULTS) if when == "before RL" else []
    assert all(float(low) <= float(one.split()[0]) for one in seen) and bool(seen) == (when == "before RL")


def test_losses_said_to_differ_between_processors_are_those_of_the_logs() -> None:
    """Seed 0 without and with AVX-512."""
    logs = [(LOGS / f"tinywiki_default_seed0{name}.txt").read_text() for name in ("", "_avx512")]
    quoted = re.findall(r"([\d.]+) and ([\d.]+) at step (\d+)", RESULTS)
    assert [step for *_, step in quoted] == ["20", "40", "500"]
    for *losses, step in quoted:
        for loss, log in zip(losses, logs, strict=True):
            [stored] = re.findall(rf"step {step}/500 \w+ loss ([\d.]+)", log)
            assert float(loss) == pytest.approx(float(stored), abs=0.00051)
