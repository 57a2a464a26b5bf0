"""The notebooks, executed from the first cell to the last: one makes a small run, the others read it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from e2e_world import ENV, ROOT
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = ROOT / "notebooks"


def execute(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path = NOTEBOOKS, **variables: str) -> str:
    """Run a notebook in `folder`; what it printed, or nbclient's error, which shows the cell."""
    for key, value in (ENV | variables).items():
        monkeypatch.setitem(os.environ, key, value)
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    patience = {"timeout": 1800, "startup_timeout": 300, "iopub_timeout": 300}
    with tempfile.TemporaryDirectory() as sockets:
        # A port that is chosen here would be free only until another program is given it; files are not.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        NotebookClient(notebook, kernel_name="python3", resources=resources, config=config, **patience).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_and_the_analysis_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "clone" / "runs" / "demo"
    printed = execute("search_r1_demo.ipynb", monkeypatch, DEMO_SIZE="small", DEMO_FOLDER=str(run_dir))
    assert "tinywiki_2hop" in printed and "--- with an engine of our own" in printed
    assert (run_dir / "rl" / "report.png").is_file()
    # A run that a script started in the clone's root has paths relative to it.
    config = run_dir / "rl" / "config.yaml"
    config.write_text(config.read_text().replace(f"{tmp_path / 'clone'}/", ""))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "clone" / "notebooks").mkdir()
    analysis = execute("reward_analysis.ipynb", monkeypatch, tmp_path / "clone" / "notebooks")
    assert "2 steps, 48 trajectories, 0 failed" in analysis
    assert "format reward" in analysis
    why = execute("why_this_reward.ipynb", monkeypatch, tmp_path / "clone" / "notebooks")
    assert "because:" in why and re.search(r"id \d+ score \d", why), why
    assert "furthest from the anchor" in why and "half of what the anchor is" in why
    found = re.search(r"2 steps; stored and logged KL differ by at most (\S+) nats", why)
    assert found is not None and float(found[1]) < 1e-6
