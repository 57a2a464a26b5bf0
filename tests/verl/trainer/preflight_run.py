"""The settings of a run that the preflight has nothing to say against, but for what a test changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

QUESTION = "Who founded Osk"
PASSAGES = {"1": '"Osk"\nOsk is a town that Ila Brenn founded.', "2": '"Lune"\nLune is a river near Osk.'}


def given(prompt_file: Path, run_dir: Path, model: Path, *overrides: str) -> list[str]:
    return [
        f"data.train_files={prompt_file}", f"data.val_files={prompt_file}", f"trainer.default_local_dir={run_dir}",
        f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "data.max_start_length=400", "data.max_prompt_length=512",
        "trainer.logger=[console]", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *overrides,
    ]  # fmt: skip


def small_run(prompt_file: Path, run_dir: Path, model: Path, *overrides: str) -> list[str]:
    """The same with batches and lengths that fit the prompt, the model's window and any machine."""
    small = [
        "data.max_start_length=900", "data.max_prompt_length=910", "data.max_response_length=100",
        "data.max_obs_length=200",
    ]  # fmt: skip
    return given(prompt_file, run_dir, model, *small, *overrides)


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]
