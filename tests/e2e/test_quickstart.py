"""The README's first command as a user types it, in full: about ten minutes on two idle cores."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT

SCORES = re.compile(r"^(\S+)\s+([01]\.\d+) -> ([01]\.\d+)$", re.MULTILINE)


@pytest.mark.slow
def test_quickstart_trains_an_agent_that_searches_twice(tmp_path: Path) -> None:
    command = ["bash", "scripts/quickstart.sh", "--seed", "11", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    scores = {name: (float(before), float(after)) for name, before, after in SCORES.findall(done.stdout)}
    assert scores["tinywiki_2hop"][0] <= 0.1, "the warm start does not search twice"
    assert scores["tinywiki_2hop"][1] >= 0.5 and scores["overall"][1] >= 0.75
    assert "Answer:" in done.stdout and (tmp_path / "rl" / "report.png").is_file()
