from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preflight_run import PASSAGES, QUESTION, given
from run_config import run_config

from search_r1.data.qa.build import prompt_row, write_prompts
from search_r1.data.qa.formats import QaRow
from search_r1.llm_agent.templates import load_template
from verl.config import Config


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Two rows, made with the template search_r1."""
    template = load_template("search_r1")
    questions = [QaRow("0", QUESTION, ["Ila Brenn"], "{}", 0), QaRow("1", "Where is Lune", ["Osk"], "{}", 1)]
    rows = [prompt_row(row, "nq", "train", template, None) for row in questions]
    write_prompts(tmp_path / "train.parquet", rows, template)
    return tmp_path / "train.parquet"


@pytest.fixture
def make_config(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Config]:
    def make(*overrides: str) -> Config:
        long = ("data.max_start_length=900", "data.max_prompt_length=1000")
        return run_config(given(prompt_file, tmp_path / "run", tiny_model_dir, *long, *overrides))

    return make


@pytest.fixture
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preflight does without its estimate of memory, which takes longer than all else."""
    from verl.planning.dry_run.device import AtOnce
    from verl.planning.dry_run.run import DryRun

    found = DryRun([], [], "", "ok", "not estimated", AtOnce(tokens=1000, window=1000, limit=1, share=1))
    monkeypatch.setattr("verl.trainer.start_checks.findings.dry_run", lambda *_: found)


@pytest.fixture(scope="session")
def osk_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The project's retrieval server over `PASSAGES`, in a thread of this process."""
    from served_app import served_corpus, write_passages

    with served_corpus(write_passages(tmp_path_factory.mktemp("osk") / "corpus.jsonl", PASSAGES)) as url:
        yield url
