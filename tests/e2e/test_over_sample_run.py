"""A run with over-sampling and a slow retriever: groups are carried over, and none is lost at a resume."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from async_runs import CORRECTED, PLAIN, prompts_of, stored
from e2e_world import ROOT, free_port, metrics_by_step, run_here, small_run, wait_until_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # two runs each
LAST = 4


@pytest.fixture
def slow_url(tinywiki_url: str) -> Iterator[str]:
    """The retriever behind a delay with a long tail."""
    parts, port = urlsplit(tinywiki_url), free_port()
    delay = ("--ms", "50", "--tail_ms", "400", "--cap_ms", "4000")
    upstream = ("--upstream", f"{parts.scheme}://{parts.netloc}", "--port", str(port))
    proxy = subprocess.Popen([sys.executable, "scripts/bench/slow_retriever.py", *upstream, *delay], cwd=ROOT)
    try:
        wait_until_up(proxy, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}{parts.path}"
    finally:
        proxy.terminate()
        proxy.wait()


@pytest.mark.parametrize("mode", ["off", "one_step_off"])
def test_slow_groups_go_on_in_the_next_step(
    mode: str, ray_session: object, tinywiki: Path, policy: Path, slow_url: str, tmp_path: Path
) -> None:
    own = (f"trainer.total_training_steps={LAST}", f"trainer.async_rollout={mode}", "trainer.save_freq=1")
    share = "actor_rollout_ref.rollout.over_sample=0.5"
    command = small_run(tinywiki, policy, slow_url, tmp_path, *PLAIN, *CORRECTED, *own, share)
    assert run_here(*command) == 0
    assert_trained_once(tmp_path)
    most = {"off": 1, "one_step_off": 2}[mode]
    metrics = metrics_by_step(tmp_path)
    assert [metrics[step]["rollout/over_sample/carried"] for step in range(1, LAST + 1)] == [3, 3, 3, 0]
    assert all(metrics[step]["rollout/staleness/max"] <= most for step in metrics)
    assert any(len(versions) > 1 for step in range(2, LAST + 1) for versions in versions_by_row(tmp_path, step))
    state = tmp_path / "state" / "global_step_2"
    assert run_here(*command, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={state}") == 0
    assert_trained_once(tmp_path)


def assert_trained_once(folder: Path) -> None:
    """Whole groups of four, and no question in two steps."""
    drawn = [question for questions in prompts_of(folder, LAST) for question in questions]
    assert len(drawn) == 6 * LAST and len(set(drawn)) == len(drawn)
    for step in range(1, LAST + 1):
        assert set(Counter(row["group_id"] for row in stored(folder, step)).values()) == {4}


def versions_by_row(folder: Path, step: int) -> list[set[int]]:
    """Each of which has as many tokens as were sampled by it."""
    found = []
    for row in stored(folder, step):
        parts = [part for segment in row["segments"] for part in segment["weight_versions"] or ()]
        assert sum(part["num_tokens"] for part in parts) == sum(row["loss_mask"])
        found.append({part["version"] for part in parts})
    return found
