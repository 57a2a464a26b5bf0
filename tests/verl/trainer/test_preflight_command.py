"""The whole command, from arguments to exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight_run import QUESTION, small_run

from verl.errors import ConfigError
from verl.trainer import main_ppo
from verl.trainer.preflight.__main__ import main, parse

FORMAT = ("reward_model.structure_format_score=0.2", "reward_model.final_format_score=0.1")


def lines(level: str, out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(level)]


def test_the_whole_command(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    status = main(arguments)
    out = capsys.readouterr().out
    failures = lines("FAIL", out)
    assert [line for line in failures if "not installed" not in line and "is needed" not in line] == []
    assert status == bool(failures)
    assert "mask 0" in out and "mask 1" in out and "memory: fits" in out and "workers on CPU" in out
    assert "for verl.trainer.main_ppo\n" in out
    assert f"passages for {QUESTION!r}" in out and "the first is 'Osk'" in out
    assert {line.split(":")[0] for line in lines("ok", out)} >= {"ok   ports", "ok   ray", "ok   retriever host"}


@pytest.mark.usefixtures("no_dry_run")
def test_no_check_hides_another(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    hidden = "retriever.url=http://user:hunter2@no-such-host.invalid:8000/retrieve"
    quick = ("retriever.timeout_s=1", "retriever.deadline_s=1", "data.max_prompt_length=1000")
    assert main(small_run(prompt_file, tmp_path / "file" / "run", tiny_model_dir, hidden, *quick)) == 1
    out = capsys.readouterr().out
    whats = {line[5:].split(":")[0] for line in lines("FAIL", out)}
    assert whats >= {"run folder", "retriever host", "environment", "window"}
    assert "hunter2" not in out


@pytest.mark.usefixtures("no_dry_run")
def test_settings_of_the_format_reward(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}", *FORMAT)
    asked = parse(arguments)
    assert asked.entry_point == "verl.trainer.main_ppo_format"
    assert asked.config.reward.kwargs == {
        "structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.0
    }  # fmt: skip
    main(arguments)
    out = capsys.readouterr().out
    assert "ok   config: for verl.trainer.main_ppo_format\n" in out and "ok   inputs" in out
    with pytest.raises(ConfigError, match="brings its own reward"):
        parse([*arguments, "reward.function=mine.Reward"])


@pytest.mark.usefixtures("no_dry_run")
def test_what_will_hardly_do_what_was_meant_is_told_before_anything_starts(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # main sets one for the process
    loss = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=kl")
    arguments = small_run(tmp_path / "gone.parquet", tmp_path / "run", tiny_model_dir, *loss)
    assert main_ppo.main(arguments) == 2
    assert "gone.parquet: no such file" in capsys.readouterr().err
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "actor_rollout_ref.actor.kl_loss_type=kl has a gradient of zero on average"
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "warn config: actor_rollout_ref.actor.kl_loss_type=kl has a gradient" in out
    assert "FAIL inputs" in out and "gone.parquet: no such file" in out
