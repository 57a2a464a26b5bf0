"""A run folder of an earlier version (stored/run.tar.xz) is read and resumed by this one.

Two steps of GRPO with a moving anchor, on four prompts with a model of 11,000 parameters. Its state has no digest of
the prompts, and its config none of the settings that came later.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from verl.config import Config
from verl.config.loading.run import load_stored_config
from verl.data.prompts import PromptSource
from verl.errors import DataError
from verl.run.checkpoints import Checkpoints
from verl.run.resuming import settings_since, sources_since, state_to_resume
from verl.single_controller import ResourcePool
from verl.trainer.collapse_guard import Recovery
from verl.trainer.estimates import Estimator
from verl.trainer.sampling.rollout_source import SamplingState
from verl.workers.roles import ActorGroup


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(Path(__file__).parent / "stored" / "run.tar.xz") as archive:
        archive.extractall(folder)  # our own; the first releases of Python 3.11 have no filter
    return folder


def config_of(stored: Path, *overrides: str) -> Config:
    resumed = ("trainer.resume_mode=auto", f"trainer.default_local_dir={stored}")
    return load_stored_config(stored / "config.yaml", [*resumed, *overrides])


def test_a_run_of_an_earlier_version_is_resumed(
    ray_session: Any, stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stored / "actor" / "global_step_2"
    settings = (
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={stored}",
        f"data.train_files={stored}/prompts.parquet",
    )
    config = load_stored_config(stored / "config.yaml", [*settings, f"actor_rollout_ref.model.path={model}"])
    assert {change.key for change in settings_since(config)} >= {"trainer.resume_mode", "trainer.sigterm_grace_s"}
    data = config.data
    prompts = PromptSource(
        data.train_files,
        AutoTokenizer.from_pretrained(model),
        max_start_length=data.max_start_length,
        shuffle=data.shuffle_train_dataloader,
        seed=config.trainer.seed,
    )
    [said] = sources_since(config.trainer, prompts, {"the validation prompts": "any"})
    assert "does not say which prompts" in said

    state = state_to_resume(config.trainer)
    assert state == stored / "state" / "global_step_2"
    actor = ActorGroup(config, ResourcePool(1, 1, "cpu"), 3, True)
    try:
        checkpoints = Checkpoints(stored, actor, None, with_anchor=True)
        progress = checkpoints.resume(state)
        actor.save(tmp_path / "again")
    finally:
        actor.shutdown()
    assert progress["step"] == 2 and checkpoints.steps == [2]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    estimator = Estimator(config)
    Recovery(config.trainer.collapse_guard, checkpoints, estimator.kl_weight).guard.load_state_dict(progress["guard"])
    SamplingState.from_json(progress).put_back(prompts)
    assert prompts.state_dict()["position"] == 4, "the next draw begins another epoch"
    assert len({prompt.index for prompt in prompts.next(4)}) == 4


def test_with_another_number_of_prompts_it_is_refused(stored: Path) -> None:
    config = load_stored_config(
        stored / "config.yaml", ["trainer.resume_mode=auto", f"trainer.default_local_dir={stored}"]
    )
    tokenizer = AutoTokenizer.from_pretrained(stored / "actor" / "global_step_2")
    fewer = PromptSource(str(stored / "prompts.parquet"), tokenizer, max_start_length=60, num_rows=3)
    with pytest.raises(DataError, match="the number of prompts was 4 and is 3. Give the run the files"):
        sources_since(config.trainer, fewer, {})
