"""A run folder used again or at once: refused, continued, or moved aside; what a user keeps there stays."""

from __future__ import annotations

import copy
import fcntl
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from preflight_run import small_run
from run_config import run_config
from transformers import PreTrainedTokenizerFast

from verl.config import Config
from verl.config.sections.fields import leaves
from verl.data.prompts import PromptSource
from verl.errors import CheckpointError, ConfigError, DataError, StorageError, VerlError
from verl.run import resuming, run_folder, saved_state
from verl.run.last_checkpoint import last_checkpoint
from verl.run.resuming import check_start, prepare_folder, settings_since, sources_since
from verl.run.run_folder import LOCK, check_not_in_use, run_lock
from verl.tracking.changed_settings import HARMLESS
from verl.tracking.run_data import load_run
from verl.tracking.spans import write_timeline
from verl.tracking.tracker import Tracker
from verl.trainer import sft
from verl.trainer.main_ppo import main as main_ppo
from verl.trainer.main_ppo import run as train
from verl.trainer.preflight import main as preflight
from verl.trainer.start_checks.inputs import check_inputs
from verl.trainer.starting import Run

MINE = ("notes.md", "actor/global_step_2_copy/model", "trajectories/mine.parquet", "metrics.jsonl.bak", "eval/a.json")
RESUME, ARCHIVE = "trainer.resume_mode=auto", "trainer.overwrite=archive"


@cache
def loaded(*overrides: str) -> Config:
    return run_config(list(overrides))


def settings(run_dir: Path, *overrides: str) -> Config:
    config = copy.deepcopy(loaded(*overrides))
    config.trainer.default_local_dir = str(run_dir)
    return config


def leave_run(run_dir: Path, *steps: int, states: bool = True, overrides: tuple[str, ...] = ()) -> None:
    """What a run of these saved steps leaves, and things of the user's own beside it."""
    with Tracker([], "p", "e", run_dir, asdict(settings(run_dir, *overrides))) as tracker:
        for step in range(max(steps, default=1) + 1):
            tracker.log({"critic/score/mean": 0.1 * step}, step)
    for step in steps:
        for role in ("actor", "ref"):
            touch(run_dir / role / f"global_step_{step}" / "config.json")
        touch(run_dir / "trajectories" / f"train_step_{step}.parquet")
        if states:
            path = saved_state.state_path(run_dir, step)
            saved_state.finish(saved_state.begin(path, ["actor"], {"step": step}), path, {})
    for name in MINE:
        touch(run_dir / name)


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_command_typed_twice_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    leave_run(tmp_path, 2, 10)
    before = files(tmp_path)
    for start in (check_start, prepare_folder):
        with pytest.raises(ConfigError) as refused:
            start(settings(tmp_path).trainer)
        said = str(refused.value)
        assert f"{tmp_path} holds a run already (its last checkpoint is actor/global_step_10)" in said
        assert all(way in said for way in (RESUME, "trainer.default_local_dir=", ARCHIVE))
    assert files(tmp_path) == before


def test_main_ppo_and_preflight_refuse_before_they_read_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the prompt files nor the model is there: the folder is what is named."""
    leave_run(tmp_path, 2)
    own = ["data.train_files=gone.parquet", "data.val_files=gone.parquet", "actor_rollout_ref.model.path=/gone"]
    own += [f"trainer.default_local_dir={tmp_path}", "algorithm.adv_estimator=grpo"]
    own += ["actor_rollout_ref.rollout.n_agent=5", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    assert main_ppo(own) == 2
    assert "holds a run already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds a run already"):  # as a notebook starts it
        train(settings(tmp_path))
    assert resuming.main(own) == 2 and resuming.main([*own, RESUME]) == 0
    assert resuming.main([*own, ARCHIVE]) == 0


def test_the_look_at_the_folder_offers_no_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        resuming.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--config-name" in said and "--multirun" not in said
    assert resuming.main(["-m", "trainer.seed=0,1"]) == 2
    assert "takes one configuration: leave out -m" in capsys.readouterr().err


@pytest.mark.usefixtures("no_dry_run")
def test_preflight_says_so_too(tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [f"trainer.default_local_dir={tmp_path}", f"actor_rollout_ref.model.path={tiny_model_dir}"]
    own += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5", "trainer.device=cpu"]
    leave_run(tmp_path, 2, overrides=("algorithm.gamma=0.9", "trainer.save_freq=7"))
    assert preflight(own) == 1
    assert f"FAIL start: {tmp_path} holds a run already" in capsys.readouterr().out
    preflight([*own, RESUME])
    out = capsys.readouterr().out
    assert "ok   start: resumes an earlier run" in out
    assert "warn start: algorithm.gamma: 0.9 -> 1.0 (may change what is learned)" in out
    assert "ok   start: trainer.save_freq: 7 -> -1 (does not change what is learned)" in out


def test_archive_moves_all_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    leave_run(tmp_path, 2, 10)
    before = files(tmp_path)
    for name in ("tensorboard/events.out.tfevents.1.host.2", "wandb/offline-run-1/run.wandb", "stacks/driver-7.txt"):
        touch(tmp_path / name)
    prepare_folder(settings(tmp_path, ARCHIVE).trainer)
    [kept] = (tmp_path / "archive").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", kept.name)
    left = {name for name in files(tmp_path) if not name.startswith("archive/")}
    assert left == set(MINE), "what is the user's stays where it is"
    assert {name: content for name, content in before.items() if name not in MINE}.items() <= files(kept).items()
    assert not (tmp_path / "state").exists() and not (tmp_path / "wandb").exists()
    # The archive is a run folder, and the next run is one like any other.
    assert max(load_run(kept).metrics) == 10 and last_checkpoint(kept).name == "global_step_10"
    leave_run(tmp_path, 4)
    prepare_folder(settings(tmp_path, ARCHIVE).trainer)
    assert len(list((tmp_path / "archive").iterdir())) == 2
    check_start(settings(tmp_path).trainer)


def test_two_archives_in_a_second(tmp_path: Path) -> None:
    for _ in range(3):
        leave_run(tmp_path, 1)
        assert run_folder.archive(tmp_path)
    assert len(list((tmp_path / "archive").iterdir())) == 3 and run_folder.archive(tmp_path) is None


@pytest.mark.parametrize("overrides", [(), (RESUME,), (ARCHIVE,)])
def test_what_a_start_that_failed_leaves_is_no_run(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    Tracker([], "p", "e", tmp_path, {}).finish()
    touch(tmp_path / "notes.md")
    prepare_folder(settings(tmp_path, *overrides).trainer)
    assert sorted(files(tmp_path)) == ["config.yaml", "notes.md"]
    prepare_folder(settings(tmp_path / "not_there_yet", *overrides).trainer)


def test_auto_without_a_state_moves_the_first_attempt_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a supervisor starts it again: killed before its first state, it must neither be refused nor mix."""
    leave_run(tmp_path, 2, states=False)
    prepare_folder(settings(tmp_path, RESUME).trainer)
    assert not run_folder.holds_run(tmp_path) and "without a checkpoint to resume from; it was moved to" in caplog.text


def test_auto_with_a_state_moves_nothing(tmp_path: Path) -> None:
    leave_run(tmp_path, 2, 4)
    before = files(tmp_path)
    prepare_folder(settings(tmp_path, RESUME).trainer)
    assert files(tmp_path) == before


def test_auto_that_finds_the_newest_state_damaged_moves_it_aside_with_its_model(tmp_path: Path) -> None:
    """Else an evaluation of the run's last model would be of one that this run never had."""
    leave_run(tmp_path, 2, 4, 6)
    state = saved_state.state_path(tmp_path, 6)
    (state / "trainer.json").write_text("{")
    trainer = settings(tmp_path, RESUME).trainer
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    found = resuming.state_to_resume(trainer)
    assert found == saved_state.state_path(tmp_path, 4)
    prepare_folder(trainer, found)
    assert last_checkpoint(tmp_path).name == "global_step_4" and not state.exists()
    [kept] = (tmp_path / "archive").iterdir()
    assert (kept / "actor" / "global_step_6").is_dir() and (kept / "state" / "global_step_6").is_dir()
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    prepare_folder(trainer, found)
    assert len(list((tmp_path / "archive").iterdir())) == 1


def test_going_back_to_an_earlier_state_moves_the_later_ones_aside(tmp_path: Path) -> None:
    """Else `auto` would go on from them, with weights that this run never had."""
    leave_run(tmp_path, 2, 4, 6)
    for step in (4, 6):
        write_timeline(tmp_path, step, {})
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'actor' / 'global_step_4'}")
    prepare_folder(settings(tmp_path, *named).trainer)
    assert saved_state.newest(tmp_path)[0] == saved_state.state_path(tmp_path, 4)
    assert last_checkpoint(tmp_path).name == "global_step_4" and max(load_run(tmp_path).metrics) == 4
    [kept] = (tmp_path / "archive").iterdir()
    assert max(load_run(kept).metrics) == 6 and last_checkpoint(kept).name == "global_step_6"
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["step_4.json"]
    assert [path.name for path in (kept / "timeline").iterdir()] == ["step_6.json"]
    prepare_folder(settings(tmp_path, *named).trainer)
    assert len(list((tmp_path / "archive").iterdir())) == 1, "nothing is later any more"


@pytest.mark.parametrize(
    ("harm", "role", "error"),
    [
        ("{", "actor", "trainer.json has 1 bytes, not"),
        ('{"prompts": {"digest": "another"}}', "actor", "the digest of the prompts was another"),
        (None, "model", "has no actor: it belongs to a run with other roles"),  # that of a warm start
    ],
)
def test_a_start_that_is_refused_leaves_the_later_states_where_they_are(
    tmp_path: Path, prompt_file: Path, tiny_model_dir: Path, harm: str | None, role: str, error: str
) -> None:
    run_dir = tmp_path / "run"
    leave_run(run_dir, 2, 4, 6)
    path = saved_state.state_path(run_dir, 2)
    saved_state.finish(saved_state.begin(path, [role], {"step": 2}), path, {})
    if harm is not None:
        (path / saved_state.TRAINER).write_text(harm)
    before = files(run_dir)
    own = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}", "do_search=false"]  # no retriever
    own += ["actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.n=2"]
    config = run_config(small_run(prompt_file, run_dir, tiny_model_dir, *own))
    inputs = check_inputs(config)
    with pytest.raises(VerlError, match=error):
        Run(config, "cpu", inputs)
    assert files(run_dir) == before


def test_a_run_that_starts_from_another_ones_state_needs_a_free_folder(tmp_path: Path) -> None:
    leave_run(tmp_path / "one", 2)
    leave_run(tmp_path / "two", 2)
    state = tmp_path / "one" / "state" / "global_step_2"
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={state}")
    with pytest.raises(ConfigError, match="two holds a run already"):
        check_start(settings(tmp_path / "two", *named).trainer)
    prepare_folder(settings(tmp_path / "two", *named, ARCHIVE).trainer)
    assert not run_folder.holds_run(tmp_path / "two") and run_folder.holds_run(tmp_path / "one")
    with pytest.raises(ConfigError, match="would move away the checkpoint"):
        check_start(settings(tmp_path / "one", *named, ARCHIVE).trainer)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        check_start(settings(tmp_path / "three", named[0], "trainer.resume_from_path=/gone/global_step_1").trainer)


def test_resuming_and_archiving_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one"):
        settings(tmp_path, RESUME, ARCHIVE)


def test_settings_that_a_resumed_run_changes_are_told_apart(tmp_path: Path) -> None:
    before = ("reward.kwargs={a: 1}", "trainer.save_freq=10", "data.train_files=c")
    leave_run(tmp_path, 2, overrides=(*before, "retriever.url=http://name:12345678@host/retrieve"))
    now = ("reward.kwargs={b: 2}", "trainer.save_freq=20", "data.train_files=[a, b]")
    changes = settings_since(settings(tmp_path, RESUME, *now))
    assert [str(change) for change in changes if change.key != "retriever.url"] == [
        "data.train_files: c -> ['a', 'b'] (may change what is learned)",
        "reward.kwargs.b: not set -> 2 (may change what is learned)",
        "reward.kwargs.a: 1 -> not set (may change what is learned)",
        "trainer.save_freq: 10 -> 20 (does not change what is learned)",
        "trainer.resume_mode: disable -> auto (does not change what is learned)",
    ]
    assert "12345678" not in json.dumps([str(change) for change in changes])
    assert settings_since(settings(tmp_path / "new", RESUME, *now)) == []


def test_what_a_resumed_run_reads_otherwise(
    prompt_file: Path, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    trainer = settings(tmp_path, RESUME).trainer
    prompts = PromptSource(str(prompt_file), byte_tokenizer, max_start_length=900)
    now = {"the template": "b", "the test prompts": "c"}
    assert sources_since(trainer, prompts, now) == [], "a new run"

    def saved(**progress: Any) -> None:
        path = saved_state.state_path(tmp_path, 2)
        path.mkdir(parents=True, exist_ok=True)
        (path / saved_state.TRAINER).write_text(json.dumps(progress))

    state = prompts.state_dict()
    saved()
    assert len(sources_since(trainer, prompts, now)) == 1, "nothing in it: its verification says so later"
    saved(prompts=state, sources={"the template": "a", "the retriever's index": "gone"})
    assert sources_since(trainer, prompts, now) == [
        "the template: a -> b (scores before and after it cannot be compared)"
    ]
    named = settings(
        tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/actor/global_step_2"
    )
    assert sources_since(named.trainer, prompts, now) == sources_since(trainer, prompts, now)
    saved(prompts=state | {"digest": "another"}, sources=now)
    with pytest.raises(DataError, match="train.parquet: the digest of the prompts was another and is"):
        sources_since(trainer, prompts, now)
    early = {name: value for name, value in state.items() if name != "digest"}
    saved(prompts=early)
    [line] = sources_since(trainer, prompts, now)
    assert "global_step_2 does not say which prompts and index it was trained with" in line


def test_keys_that_change_nothing_are_keys_and_none_of_those_that_matter() -> None:
    keys = set(leaves(Config))
    harmless = {key for key in keys if HARMLESS.fullmatch(key)}
    assert len(harmless) > 60
    matter = ("algorithm.", "reward.f", "reward.k", "data.train", "data.max_", "agent.", "max_turns", "do_search")
    assert not {key for key in harmless if key.startswith(matter)}
    assert not {key for key in harmless if ".optim." in key or "mixed_precision" in key or "mini_batch" in key}
    assert {"trainer.seed", "trainer.total_training_steps", "actor_rollout_ref.rollout.dtype"} <= keys - harmless


HOLDER = """
import sys
from pathlib import Path
from verl.run.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose run has the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_run_is_refused_until_the_first_is_killed(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    run_dir = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"run is in use by another run \(process {running.pid} on .+ANOTHER"):
            check_not_in_use(run_dir)
        with pytest.raises(ConfigError, match=rf"\(process {running.pid} on "), run_lock(run_dir):
            pass
    running.send_signal(signal.SIGKILL)
    running.wait()
    check_not_in_use(run_dir)
    with run_lock(run_dir), pytest.raises(ConfigError, match="in use"):
        check_not_in_use(run_dir)
    check_not_in_use(run_dir)


@pytest.mark.usefixtures("no_dry_run")
def test_every_program_that_writes_a_run_says_so_first(
    tmp_path: Path, running: subprocess.Popen[str], tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no data: the folder is what is named."""
    where = f"trainer.default_local_dir={tmp_path / 'run'}"
    rl = [
        "data.train_files=gone.parquet",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "trainer.device=cpu",
        where,
    ]
    rl += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5"]
    assert main_ppo(rl) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert main_ppo([*rl, "trainer.overwrite=archive"]) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert sft.main(["model.path=/gone", "data.train_files=gone.parquet", where]) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert preflight(rl) == 1
    assert f"FAIL start: {tmp_path / 'run'} is in use by another run (process {running.pid}" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_free_and_is_made(tmp_path: Path) -> None:
    check_not_in_use(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    with run_lock(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / LOCK).is_file()
    (tmp_path / "file").touch()
    check_not_in_use(tmp_path / "file")
    with pytest.raises(StorageError, match="file"), run_lock(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_lock(tmp_path):
        assert "No locks available" in caplog.text
