"""README's first command, as a user types it: a rehearsal of all its parts, and (slow) the whole of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT

SCORES = re.compile(r"^(\S+)\s+([01]\.\d+) -> ([01]\.\d+)$", re.MULTILINE)
PART = re.compile(r"^\x1b\[1m\[ *\d+s\] (set-up|[^:,(/\x1b]*).*$", re.MULTILINE)
PARTS = [
    *("set-up", "TinyWiki", "warm start", "retrieval server", "reinforcement learning", "one question"),
    "exact match on",
]


def scores_of(printed: str) -> dict[str, tuple[float, float]]:
    """Exact match before and after RL, by kind of question."""
    return {name: (float(before), float(after)) for name, before, after in SCORES.findall(printed)}


def printed_by(folder: Path, *options: str, timeout_s: int) -> str:
    """What the command prints, with its run in `folder`."""
    command = ["bash", "scripts/quickstart.sh", *options, "--output_dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_the_rehearsal_goes_through_all_parts(quickstart: Path) -> None:
    printed = (quickstart / "stdout").read_text()
    _, *told = PART.split(printed)
    assert [part.strip() for part in told[::2]] == PARTS
    answered = told[2 * PARTS.index("one question") + 1]
    assert "Question: " in answered and "<think>" in answered and "Answer:" in answered, "by the trained policy"
    assert {"tinywiki_1hop", "tinywiki_2hop", "overall"} <= scores_of(printed).keys()
    assert f"Report: {quickstart}/rl/report.md" in printed and (quickstart / "rl" / "report.png").is_file()
    [model] = (Path(path) for path in re.findall(r"^Trained model: (.+)$", printed, re.MULTILINE))
    assert model == quickstart / "rl" / "actor" / "global_step_3" and (model / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_quickstart_trains_an_agent_that_searches_twice(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, "--seed", "11", timeout_s=3000)
    scores = scores_of(printed)
    assert scores["tinywiki_2hop"][0] <= 0.1, "the warm start does not search twice"
    assert scores["tinywiki_2hop"][1] >= 0.5 and scores["overall"][1] >= 0.75
    assert "Answer:" in printed and (tmp_path / "rl" / "report.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_of_marathons_goes_through_all_parts(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, "--marathon", "--small", timeout_s=1700)
    _, *told = PART.split(printed)
    assert [part.strip() for part in told[::2]] == PARTS
    assert scores_of(printed).keys() == {"overall", *(f"tinywiki_{hops}hop" for hops in range(8, 13))}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_of_a_chat_model_goes_through_all_parts(tmp_path: Path) -> None:
    """Its policy calls tools after the warm start, and scores are told for each kind of question."""
    printed = printed_by(tmp_path, "--chat", "--small", "--seed", "1", timeout_s=1700)
    _, *told = PART.split(printed)
    assert [part.strip() for part in told[::2]] == PARTS
    kinds = ("1hop", "2hop", "comparison", "page", "arithmetic", "unanswerable")
    assert scores_of(printed).keys() == {"overall", *(f"tinywiki_{kind}" for kind in kinds)}
    searches = re.findall(r"^step 1/3 .*\| searches ([\d.]+) ", printed, re.MULTILINE)
    assert float(searches[0]) > 0.3, "the warm start calls tools"
    answered = told[2 * PARTS.index("one question") + 1]
    assert "Question: " in answered and "Answer:" in answered
