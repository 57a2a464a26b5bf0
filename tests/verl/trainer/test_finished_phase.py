"""Phases of a script that are run again only if something that they depend on has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.run.finished_phase import UNCHANGED, main


@pytest.fixture
def phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a phase that has ended, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("code/a.py", "code/__pycache__/a.pyc", "rows", "out/model", "out/deep/b"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    words = ["records/sft.json", "--inputs", "code", "rows", "--results", "out", "--", "-m", "train", "seed=0"]
    assert main(["record", *words]) == 0
    return words


def unchanged(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    assert main(["check", *words]) == 0
    printed = capsys.readouterr().out
    assert printed in ("", UNCHANGED)
    return printed == UNCHANGED


def test_a_finished_phase_is_known_by_its_record(phase: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert unchanged(phase, capsys)
    Path("code/__pycache__/a.pyc").write_text("compiled again")
    Path("out/added").write_text("by somebody who reads the results")
    assert unchanged(phase, capsys)
    Path("records/sft.json").write_text("{")
    assert not unchanged(phase, capsys)
    Path("records/sft.json").unlink()
    assert not unchanged(phase, capsys)


def test_a_phase_that_wrote_nothing_is_not_finished(phase: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    other = [word if word != "out" else "nowhere" for word in phase]
    assert main(["record", *other]) != 0
    assert "the phase 'sft' ended well, but nowhere holds nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("code/a.py", "code/a.py has changed"),
        ("rows", "rows has changed"),
        ("out/model", "out/model has changed"),
        ("out/deep/b", "out/deep/b has changed"),
    ],
)
def test_a_changed_file_is_named(
    phase: list[str], name: str, said: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    Path(name).write_text("other")
    assert not unchanged(phase, capsys)
    assert f"sft: {said} since it was finished, so it is run again" in caplog.text
    Path(name).unlink()
    assert not unchanged(phase, capsys)
    assert f"sft: {name} is gone, so it is run again" in caplog.text


def test_other_settings_and_inputs_are_noticed(phase: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert not unchanged([*phase[:-1], "seed=1"], capsys)
    Path("code/new.py").write_text("another module")
    assert not unchanged(phase, capsys)
