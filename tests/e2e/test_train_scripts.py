"""Each published command trains TinyWiki for two steps, and what is new in each shows in its metrics and files."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from e2e_world import ENV, GRADIENT, ROOT, train_here
from transformers import AutoModelForTokenClassification

from verl.tracking.trajectory_store import read_trajectories
from verl.trainer.main_ppo_format import with_format_reward

WORLD = (
    "agent.template=tinywiki",
    "data.max_prompt_length=512",
    "data.max_start_length=128",
    "data.max_response_length=40",
    "data.max_obs_length=96",
    "data.val_data_num=8",
    "retriever.topk=1",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "actor_rollout_ref.actor.num_threads=1",
    "actor_rollout_ref.rollout.num_threads=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=24",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "reward.kwargs={wrong_answer_score: 0.1}",  # so weak a policy is hardly ever right
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0",
    "+trainer.val_before_train=false",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.total_training_steps=2",
    *GRADIENT,
)
GROUPS = ("data.train_batch_size=6", "actor_rollout_ref.rollout.n_agent=4")


class Run:
    """What a finished run left on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.metrics = {row["step"]: row for row in rows}
        assert all(math.isfinite(value) for row in rows for value in row.values())

    def trajectories(self, step: int) -> list[dict]:
        return read_trajectories(self.folder / "trajectories" / f"train_step_{step}.parquet")


@pytest.fixture
def script(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path):
    """Runs a train script on TinyWiki as a user would: settings from the environment, overrides behind it."""

    def start(name: str, *overrides: str) -> Run:
        experiment = f"e2e_{name.removesuffix('.sh')}_{os.getpid()}"
        environment = ENV | {"BASE_MODEL": str(policy), "EXPERIMENT_NAME": experiment, "DATA_DIR": str(tinywiki)}
        settings = (*WORLD, f"retriever.url={tinywiki_url}", f"trainer.default_local_dir={tmp_path / 'run'}")
        try:
            done = subprocess.run(
                ["bash", name, *settings, *overrides],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False,
            )  # fmt: skip
        finally:
            (ROOT / f"{experiment}.log").unlink(missing_ok=True)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        return Run(tmp_path / "run")

    return start


@pytest.mark.slow  # what it shares with the next one, and with the whole loop, is seen there
def test_grpo(script) -> None:
    run = script("train_grpo.sh", *GROUPS)
    assert len(run.trajectories(2)) == 24
    # The policy is its own anchor before the first update, and not after it.
    assert abs(run.metrics[1]["actor/kl_loss"]) < 1e-6 < run.metrics[2]["actor/kl_loss"]
    assert "critic/kl" not in run.metrics[2] and "critic/values/mean" not in run.metrics[2]
    assert run.metrics[2]["health/mismatch/mean_abs"] < 1e-4


def test_grpo_with_an_ema_anchor_and_the_top_k_kl(script) -> None:
    settings = ("+algorithm.ref_policy_ema_update_period=1", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    run = script("train_grpo_ema_pg.sh", *GROUPS, *settings, "+trainer.eval_ref_policy_freq=1")
    assert abs(run.metrics[1]["actor/kl_loss"]) < 1e-5 < run.metrics[2]["actor/kl_loss"]
    assert run.metrics[2]["ref_policy/ema_tau"] == 0.9
    assert (run.folder / "ref" / "global_step_2" / "model.safetensors").is_file()
    # Validation with the anchor's weights, after which the engine samples with the policy's again.
    assert [step for step in run.metrics if "val_ref/test_score/mean" in run.metrics[step]] == [1, 2]
    assert run.metrics[2]["health/mismatch/mean_abs"] < 1e-4


def test_ppo_with_a_critic(script, policy: Path) -> None:
    critic = ("critic.optim.lr=1e-3", "critic.optim.lr_warmup_steps_ratio=0", "critic.ppo_micro_batch_size=24")
    run = script("train_ppo.sh", "data.train_batch_size=24", "trainer.critic_warmup=1", *critic)
    first, second = run.metrics[1], run.metrics[2]
    assert first["critic/values/max"] == 0 and second["critic/values/mean"] != 0, "values start at zero, then learn"
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second, "the first step trained the critic alone"
    assert second["critic/kl"] == pytest.approx(0, abs=1e-6) and second["critic/kl_coeff"] == 0.001
    assert first["critic/vf_loss"] > 0 and second["critic/lr"] == 1e-3
    critic_model = AutoModelForTokenClassification.from_pretrained(run.folder / "critic" / "global_step_2")
    assert critic_model.score.weight.any()


def test_format_reward_greedy_baseline_and_correction(
    ray_session: object, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path
) -> None:
    """main_ppo_format, with everything that no script uses: remax, filtered groups, rejected tokens, LLDS, GSPO."""
    actor = "actor_rollout_ref.actor"
    status = train_here(
        *("-m", "verl.trainer.main_ppo_format", *WORLD, *GROUPS, f"retriever.url={tinywiki_url}"),
        "reward.kwargs={}",
        *(f"data.train_files={tinywiki / 'train.parquet'}", f"data.val_files={tinywiki / 'validation.parquet'}"),
        *(f"actor_rollout_ref.model.path={policy}", f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"),
        *("reward_model.structure_format_score=0.2", "reward_model.final_format_score=0.1"),
        *("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"),
        *(f"{actor}.rollout_correction.importance=token", f"{actor}.rollout_correction.reject=geometric"),
        *(f"{actor}.llds_coef=0.1", f"{actor}.policy_loss=gspo", f"{actor}.loss_agg_mode=seq-mean-token-mean"),
        adapt=with_format_reward,
    )
    assert status == 0
    found = Run(tmp_path)
    rows = [row for step in (1, 2) for row in found.trajectories(step)]
    assert {row["reward"] for row in rows} <= {0.0, 0.1, 0.2, 0.8, 1.0}
    assert found.metrics[2]["rollout_correction/rejected_share"] == 0
    assert 1 <= found.metrics[2]["filter_groups/rounds"] <= 2 and "actor/llds_loss" in found.metrics[2]
    validation = read_trajectories(tmp_path / "trajectories" / "val_step_2.parquet")
    assert {row["reward"] for row in validation} <= {0.0, 1.0}, "validation counts exact matches alone"
