"""The last lines of a run, from the files that it left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from verl.errors import DataError
from verl.trainer.ending import ending


def leave(run_dir: Path, *records: dict[str, float]) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_came_of_a_run_and_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "a run"
    leave(
        run_dir,
        {"step": 0, "val/test_score/mean": 0.5},
        {"step": 1, "critic/score/mean": 0.25, "timing_s/step": 40.2},
        {"step": 2, "critic/score/mean": 0.75, "timing_s/step": 45.0, "val/test_score/mean": 0.625},
    )
    model = run_dir / "actor" / "global_step_2"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert ending(run_dir, run_dir / "report.md").splitlines() == [
        "done: 2 steps in 1 min 25 s, without validation and saving",
        "  reward        0.250 (step 1) -> 0.750 (step 2)",
        "  val           0.500 (step 0) -> 0.625 (step 2)",
        f"  model         {model}",
        f"  report        {run_dir / 'report.md'}",
        f"  trajectories  .venv/bin/search-r1 view '{run_dir}'",
        f"  a question    .venv/bin/search-r1 infer --run '{run_dir}' --question \"...\"",
    ]


def test_a_run_that_only_validates_has_no_model(tmp_path: Path) -> None:
    leave(tmp_path / "run", {"step": 0, "val/test_score/mean": 0.5})
    lines = ending(tmp_path / "run", tmp_path / "run" / "report.md").splitlines()
    assert lines[:2] == ["done: validated, nothing trained", "  val           0.500 (step 0)"]
    assert not any(line.strip().startswith("model") for line in lines)


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl is missing"):
        ending(tmp_path, tmp_path / "report.md")
