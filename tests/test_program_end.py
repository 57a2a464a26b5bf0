"""How every program ends at an error that its user can mend: one line without secrets, and exit status 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import infer
from search_r1.data.tinywiki import __main__ as tinywiki
from search_r1.evaluation import __main__ as evaluation
from search_r1.replay import __main__ as replay
from search_r1.search import index_builder, retrieval_server
from search_r1.search.mcp_server import tool
from search_r1.serve import __main__ as serve
from search_r1.viewer import __main__ as viewer
from verl.planning.plan import calibrate
from verl.tracking import report
from verl.trainer import dry_run, plan

SECRET = "hf_0123456789abcdef"
Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (infer.main, ["--run", SECRET, "--question", "who"]),
        (evaluation.main, ["--run", SECRET, "--data", "a.parquet", "--output_dir", "results"]),
        (serve.main, ["--run", SECRET, "--port", "0"]),
        (viewer.main, [SECRET, "--port", "0"]),
        (replay.main, ["export", SECRET, "--output", "rows.parquet"]),
        (report.main, [SECRET]),
        (retrieval_server.main, ["--retriever_name", "bm25", "--corpus_path", SECRET, "--port", "0"]),
        (index_builder.main, ["--retrieval_method", "bm25", "--corpus_path", SECRET]),
        (tool.main, ["--url", SECRET]),
        (tinywiki.main, ["--output_dir", f"file/{SECRET}"]),
    ],
    ids=lambda value: getattr(value, "__module__", ""),
)
def test_a_person_is_asked_by_status_2_and_no_error_shows_a_secret(
    main: Main,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "file").write_text("no folder")
    status = main(arguments)
    [told] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status == 2, told
    assert "***" in told and SECRET not in told


def test_a_file_that_cannot_be_written_may_be_writable_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "file").write_text("no folder")
    assert calibrate.main(["--device", "cpu", "--output", str(tmp_path / "file" / SECRET)]) == 1
    assert "/file/*** could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("main", [dry_run.main, plan.main])
def test_a_check_that_cannot_be_run_shows_no_secret(
    main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert main([f"actor_rollout_ref.model.path={SECRET}"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("FAIL config: ") and "***" in told and SECRET not in told
