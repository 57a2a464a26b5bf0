"""States of real workers, an actor with its anchor and a critic: on a disk that fills up, damaged afterwards, and
through a rollback.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_config import run_config
from safetensors.torch import load_file
from small_disk import small_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.algorithms.kl import AdaptiveKL
from verl.config.sections.trainer import CollapseGuardConfig, TrainerConfig
from verl.errors import CheckpointError
from verl.run import saved_state
from verl.run.checkpoints import Checkpoints
from verl.run.last_checkpoint import best_checkpoint, last_checkpoint
from verl.run.resuming import state_to_resume
from verl.single_controller import ResourcePool
from verl.single_controller.waiting import Call
from verl.trainer.collapse_guard import Recovery
from verl.workers.roles import ActorGroup, CriticGroup

Roles = tuple[ActorGroup, CriticGroup]
PROGRESS = {"prompts": {"position": 3}, "kl_weight": 0.25}
# of a state, below its folder
FILES = (
    *("manifest.json", "trainer.json", "actor/.metadata", "actor/__0_0.distcp"),
    *("critic/.metadata", "critic/__0_0.distcp"),
)


@pytest.fixture(scope="module")
def roles(ray_session: Any, tiny_model_dir: Path) -> Iterator[Roles]:
    files = [f"data.{kind}_files=none.parquet" for kind in ("train", "val")]
    models = [f"{key}={tiny_model_dir}" for key in ("actor_rollout_ref.model.path", "critic.model.path")]
    config = run_config([*files, *models, "trainer.device=cpu", "algorithm.adv_estimator=gae"])
    pool = ResourcePool(1, 1, "cpu")
    actor, critic = ActorGroup(config, pool, 10, True), CriticGroup(config, pool, 10)
    yield actor, critic
    actor.shutdown()
    critic.shutdown()


@pytest.fixture(scope="module")
def run_dir(roles: Roles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the states of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder, *roles, with_anchor=True)
    for step in (1, 2):
        checkpoints.save_state(step, PROGRESS, None)
    checkpoints.settle(wait=True)
    return folder


@pytest.fixture
def harmed(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder for a test to do harm in."""
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def chosen(folder: Path) -> Path | None:
    return state_to_resume(TrainerConfig(default_local_dir=str(folder), resume_mode="auto"))


def test_a_state_is_these_files_and_can_be_loaded(run_dir: Path, roles: Roles) -> None:
    state = saved_state.state_path(run_dir, 2)
    assert sorted(str(p.relative_to(state)) for p in state.rglob("*") if p.is_file()) == sorted(FILES)
    assert chosen(run_dir) == state
    assert Checkpoints(run_dir, *roles, with_anchor=True).resume(state)["prompts"] == {"position": 3}


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"}"),
    "gone": Path.unlink,
    "first_byte": lambda file: flip(file, 0),
    "any_byte": lambda file: flip(file, random.Random(str(file.name)).randrange(file.stat().st_size)),
    "last_byte": lambda file: flip(file, file.stat().st_size - 1),
    "a_folder": lambda file: (file.unlink(), file.mkdir()),
}


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_named_and_the_state_before_is_taken(
    harmed: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved_state.state_path(harmed, 2)
    file, content = state / name, (state / name).read_bytes()
    for kind, harm in HARMS.items():
        caplog.clear()
        harm(file)
        assert chosen(harmed) == saved_state.state_path(harmed, 1), kind
        if name == "manifest.json":  # where it can still be read it is at odds with the files
            assert f"skipped a checkpoint that cannot be used: {state}/" in caplog.text and name in caplog.text, kind
        else:
            assert f"skipped a checkpoint that cannot be used: {file} " in caplog.text, kind
        if file.is_dir():
            file.rmdir()
        file.write_bytes(content)
    assert chosen(harmed) == state


@pytest.mark.parametrize("name", ["extra", "actor/__1_0.distcp", "critic/.hidden", "ref/new/file"])
def test_a_file_that_was_added_is_named(harmed: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    file = saved_state.state_path(harmed, 2) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    assert chosen(harmed) == saved_state.state_path(harmed, 1)
    assert f"skipped a checkpoint that cannot be used: {file} is not listed in manifest.json" in caplog.text


def test_what_has_the_name_of_a_state_and_is_none(harmed: Path, caplog: pytest.LogCaptureFixture) -> None:
    (harmed / "state" / "global_step_3").mkdir()
    (harmed / "state" / "global_step_4").write_text("a file")
    shutil.copytree(saved_state.state_path(harmed, 2), harmed / "state" / ".global_step_5.writing")
    assert chosen(harmed) == saved_state.state_path(harmed, 2)
    assert caplog.text.count("skipped a checkpoint that cannot be used") == 2
    assert "global_step_3/manifest.json cannot be read" in caplog.text
    assert "global_step_4/manifest.json cannot be read" in caplog.text


def test_a_manifest_without_the_files_of_a_role(harmed: Path) -> None:
    manifest = saved_state.state_path(harmed, 2) / "manifest.json"
    lines = manifest.read_text().split('"actor/')
    manifest.write_text(lines[0] + '"critic/' + lines[-1].partition('"critic/')[2])
    with pytest.raises(CheckpointError, match=r"actor/.* is not listed in manifest.json"):
        saved_state.verify(manifest.parent)


def test_any_flipped_bit_of_the_manifest_is_noticed(harmed: Path) -> None:
    state, choose = saved_state.state_path(harmed, 2), random.Random(0)
    saved_state.verify(state)
    size = (state / "manifest.json").stat().st_size
    for position in range(0, size, 3):
        bit = choose.randrange(8)
        flip(state / "manifest.json", position, bit)
        with pytest.raises(CheckpointError):
            saved_state.verify(state)
        flip(state / "manifest.json", position, bit)
    saved_state.verify(state)


def test_a_disk_that_is_full_while_a_state_is_written(roles: Roles, tmp_path: Path) -> None:
    """The state is removed and never gets its name, also when it is asked for again after space was made."""
    with small_disk(tmp_path / "disk", 64 * 2**20) as disk:
        checkpoints = Checkpoints(disk.path, *roles, with_anchor=True)
        checkpoints.save_state(1, PROGRESS, None)
        checkpoints.settle(wait=True)
        state = saved_state.state_path(disk.path, 1)
        actor = sum(path.stat().st_size for path in (state / "actor").iterdir())
        critic = sum(path.stat().st_size for path in (state / "critic").iterdir())
        for leave, what in ((0, r"global_step_2"), (actor // 2, ".*"), (actor + critic // 2, ".*")):
            disk.fill(leave)
            with pytest.raises(CheckpointError, match=f"state/.*{what}.* could not be written: the disk is full"):
                checkpoints.save_state(2, PROGRESS, None)
                checkpoints.settle(wait=True)
            disk.make_room()
            checkpoints.settle(wait=True)
            assert [path.name for path in state.parent.iterdir()] == ["global_step_1"]
            assert chosen(disk.path) == state
        checkpoints.save_state(2, PROGRESS, None)
        checkpoints.settle(wait=True)
        assert chosen(disk.path) == saved_state.state_path(disk.path, 2)


class Writer:
    """A role that writes a file a while after it is asked to, and then says what `outcome` says."""

    def __init__(self, seconds: float, outcome: CheckpointError | None) -> None:
        self.seconds, self.outcome = seconds, outcome

    def start_saving_state(self, folder: Path) -> None:
        self.thread = threading.Timer(self.seconds, lambda: os.makedirs(folder / "late", exist_ok=True))
        self.thread.start()

    def state_is_saved(self) -> bool:
        return not self.thread.is_alive()

    def begin_saved_state(self, timeout_s: float | None) -> Call:
        if self.outcome is not None:
            raise self.outcome
        return Call([], "saved_state", 1.0)


def test_a_role_that_is_still_writing_does_not_fill_the_folder_of_a_state_that_is_given_up(tmp_path: Path) -> None:
    actor, critic = Writer(0, CheckpointError("the disk is full")), Writer(1, None)
    checkpoints = Checkpoints(tmp_path, actor, critic, with_anchor=True)  # type: ignore[arg-type]
    checkpoints.save_state(1, PROGRESS, None)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.settle(wait=True)
    critic.thread.join()
    assert not list((tmp_path / "state").iterdir())


@pytest.fixture(scope="module")
def collapsed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the policy may turn into."""
    folder = tmp_path_factory.mktemp("collapsed")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def saved(checkpoints: Checkpoints, step: int, score: float | None, settle: bool = True) -> None:
    checkpoints.save(step)
    checkpoints.save_state(step, PROGRESS, score)
    if settle:
        checkpoints.settle(wait=True)


def test_a_rollback_while_a_collapsed_state_is_written_and_a_kill_after_it(
    roles: Roles, collapsed: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Step 2 has collapsed weights and the best score; step 4 notices and goes back to step 1."""
    roles[0].load(tiny_model_dir)
    checkpoints = Checkpoints(tmp_path, *roles, with_anchor=True, max_to_keep=2)
    saved(checkpoints, 1, score=0.4)
    roles[0].load(collapsed)
    saved(checkpoints, 2, score=0.9, settle=False)
    recovery = Recovery(
        CollapseGuardConfig(action="rollback", patience=2, max_repetition=0.5), checkpoints, AdaptiveKL(1, 1, 9)
    )
    answers = []
    for step in (3, 4):
        recovery.watch({"health/repetition": 0.9}, step)
        answers.append(recovery.act(step))
    assert answers == [None, 1]
    assert recovery.kl_weight.value == 0.25, "that of step 1, not that which followed the KL of collapsed weights"
    saved(checkpoints, 4, score=None)

    roles[0].load(collapsed)
    resumed = Checkpoints(tmp_path, *roles, with_anchor=True, max_to_keep=2)
    state = chosen(tmp_path)
    assert state == saved_state.state_path(tmp_path, 4)
    resumed.resume(state)
    resumed.actor.save(tmp_path / "resumed")
    assert same_weights(tmp_path / "resumed", tmp_path / "actor" / "global_step_1")
    assert same_weights(last_checkpoint(tmp_path), tmp_path / "actor" / "global_step_1")
    assert best_checkpoint(tmp_path) == tmp_path / "actor" / "global_step_1"
    assert resumed.kl_weights == {1: 0.25, 4: 0.25}
    assert resumed.best == checkpoints.best == 1 and resumed.steps == checkpoints.steps == [1, 4]
    assert not any((tmp_path / folder / "global_step_2").exists() for folder in ("actor", "ref", "critic", "state"))


def test_what_was_abandoned_goes_when_a_later_state_is_there_and_not_before(roles: Roles, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, *roles, with_anchor=True, max_to_keep=2)
    for step in (1, 2):
        saved(checkpoints, step, score=None)
    checkpoints.load(1)
    saved(checkpoints, 3, score=None, settle=False)
    assert chosen(tmp_path) == saved_state.state_path(tmp_path, 2), "killed here, it would go back once more"
    checkpoints = Checkpoints(tmp_path, *roles, with_anchor=True, max_to_keep=2)
    checkpoints.resume(saved_state.state_path(tmp_path, 2))
    checkpoints.load(1)
    saved(checkpoints, 3, score=None)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["global_step_1", "global_step_3"]


def test_a_state_is_kept_until_the_next_is_whole(roles: Roles, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, *roles, with_anchor=True, max_to_keep=1)
    saved(checkpoints, 1, score=None, settle=False)
    saved(checkpoints, 2, score=None, settle=False)  # gives the state of step 1 its name
    assert chosen(tmp_path) == saved_state.state_path(tmp_path, 1)
    checkpoints.settle(wait=True)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["global_step_2"]


def same_weights(one: Path, other: Path) -> bool:
    tensors, others = (load_file(path / "model.safetensors") for path in (one, other))
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
