"""The exit status of scripts/security.sh for each outcome of its tools, which stand-ins play: they need a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# As an interpreter: `-m venv DIR` makes another one of these, `-c` is real, and each tool does what its variable says.
PYTHON = """#!/usr/bin/env bash
case "$2" in
  venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  pip) exit "$PIP" ;;
  bandit) exit "$BANDIT" ;;
  pip_audit)
    if [[ -n $REPORT ]]; then echo "$REPORT" >"${@: -1}"; else echo "no route to host" >&2; exit 1; fi ;;
  *) exec "$REAL" "$@" ;;
esac
"""
CLEAN = {"name": "torch", "version": "2", "vulns": []}
FOUND = {"name": "bad", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2"]}]}
SKIPPED = {"name": "unknown", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "bandit", "pip", "status", "said"),
    [
        ([CLEAN, CLEAN], 0, 0, 0, "2 of 2 packages looked up, 0 vulnerable"),
        ([CLEAN, FOUND], 0, 0, 1, "bad 1 CVE-1 fixed in 1.1, 2"),
        ([CLEAN, SKIPPED], 0, 0, 2, "1 of 2 packages looked up, 0 vulnerable"),
        ([FOUND, SKIPPED], 0, 0, 1, "packages with known vulnerabilities"),
        ([], 0, 0, 2, "0 of 0 packages looked up"),
        (None, 0, 0, 2, "no route to host"),
        (None, 1, 0, 1, "bandit found insecure code"),
        ([CLEAN], 1, 0, 1, "bandit found insecure code"),
        ([CLEAN], 0, 1, 2, "the tools could not be installed"),
    ],
)
def test_exit_status(
    packages: list[dict] | None, bandit: int, pip: int, status: int, said: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    report = "" if packages is None else json.dumps({"dependencies": packages})
    variables = {"PYTHON": str(python), "REAL": sys.executable, "PIP": str(pip), "BANDIT": str(bandit)}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/security.sh")],
        env=os.environ | variables | {"REPORT": report, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert not list(temporary.iterdir()), "the environment is thrown away"
