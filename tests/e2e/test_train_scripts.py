"""Published commands train TinyWiki for two steps, and what is new in each shows in its metrics and files.

`train_grpo_ema_pg.sh` is what a new user trains by in test_new_users_hour.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from e2e_world import ENV, GRADIENT, ROOT, run_here
from transformers import AutoModelForTokenClassification

from search_r1.llm_agent.templates import TEMPLATE_FILE
from verl.config.rules.rewards import with_format_reward
from verl.run import saved_state
from verl.tracking.trajectory_store import read_trajectories

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


@pytest.fixture(scope="module")
def command(tinywiki: Path, policy: Path, tinywiki_url: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """A train script on TinyWiki as a user starts it: settings from the environment, overrides behind it."""
    experiment = f"e2e_{os.getpid()}"
    environment = ENV | {"BASE_MODEL": str(policy), "EXPERIMENT_NAME": experiment, "DATA_DIR": str(tinywiki)}

    def of(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
        settings = (*WORLD, f"retriever.url={tinywiki_url}", f"trainer.default_local_dir={folder}")
        return {"args": ["bash", name, *settings, *overrides], "cwd": ROOT, "env": environment, "text": True}

    yield of
    (ROOT / f"{experiment}.log").unlink(missing_ok=True)


@pytest.mark.slow  # what it shares with the others, and with the whole loop, is seen there
def test_grpo(command: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    done = subprocess.run(**command("train_grpo.sh", tmp_path, *GROUPS), capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    run = Run(tmp_path)
    assert len(run.trajectories(2)) == 24
    # The policy is its own anchor before the first update, and not after it.
    assert abs(run.metrics[1]["actor/kl_loss"]) < 1e-6 < run.metrics[2]["actor/kl_loss"]
    assert "critic/kl" not in run.metrics[2] and "critic/values/mean" not in run.metrics[2]
    assert run.metrics[2]["health/mismatch/mean_abs"] < 1e-4


class Stopped(NamedTuple):
    """A PPO run after SIGTERM, which came after its first step; it saves nothing but because of that."""

    run: Run
    last: int  # step
    said: str
    begun: list[str]  # its processes before, by their command lines
    left: list[str]  # and after


@pytest.fixture(scope="module")
def ppo(command: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("ppo")
    critic = ("critic.optim.lr=1e-3", "critic.optim.lr_warmup_steps_ratio=0", "critic.ppo_micro_batch_size=24")
    endless = ("trainer.total_training_steps=1000", "trainer.save_freq=-1", "trainer.sigterm_grace_s=600")
    given = command(
        "train_ppo.sh", folder / "run", "data.train_batch_size=24", "trainer.critic_warmup=1", *critic, *endless
    )
    given["env"] = given["env"] | {MARK: str(folder)}
    with (folder / "log").open("w+") as log:
        trainer = subprocess.Popen(**given, stdout=log, stderr=subprocess.STDOUT)
        metrics = folder / "run" / "metrics.jsonl"
        while trainer.poll() is None and not (metrics.is_file() and "critic/vf_loss" in metrics.read_text()):
            time.sleep(0.2)
        begun = _marked(folder)
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(timeout=300)
        deadline = time.monotonic() + 120
        while (left := _marked(folder)) and time.monotonic() < deadline:
            time.sleep(0.2)
        said = Path(log.name).read_text()
    assert status == 130, said[-6000:]
    run = Run(folder / "run")
    return Stopped(run, max(run.metrics), said, begun, left)


def test_ppo_with_a_critic(ppo: Stopped) -> None:
    first, second = ppo.run.metrics[1], ppo.run.metrics[2]
    assert first["critic/values/max"] == 0 and second["critic/values/mean"] != 0, "values start at zero, then learn"
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second, "the first step trained the critic alone"
    assert second["critic/kl"] == pytest.approx(0, abs=1e-6) and second["critic/kl_coeff"] == 0.001
    assert first["critic/vf_loss"] > 0 and second["critic/lr"] == 1e-3
    critic = ppo.run.folder / "critic" / f"global_step_{ppo.last}"
    critic_model = AutoModelForTokenClassification.from_pretrained(critic)
    assert critic_model.score.weight.any()


def test_sigterm_saves_the_step_in_hand_and_stops_everything(ppo: Stopped) -> None:
    """The script is the trainer by then: it gets the signal."""
    state = saved_state.state_path(ppo.run.folder, ppo.last)
    assert [path.name for path in saved_state.saved(ppo.run.folder)] == [state.name]
    saved_state.verify(state)
    assert ppo.said.splitlines()[-1].startswith("interrupted") and str(state) in ppo.said.splitlines()[-1]
    assert "Traceback" not in ppo.said and "SIGTERM: the run ends after this step and saves it" in ppo.said
    assert (ppo.run.folder / "actor" / state.name / "model.safetensors").is_file()
    shipped = ROOT / "search_r1" / "llm_agent" / "templates" / "tinywiki.txt"
    assert (ppo.run.folder / TEMPLATE_FILE).read_bytes() == shipped.read_bytes()
    assert len(ppo.begun) > 4, "the trainer, Ray, its workers and the engine carry the mark"
    assert ppo.left == []


MARK = "VERL_TEST_FOLDER"


def _marked(folder: Path) -> list[str]:
    """Command lines of the processes that were started, however indirectly, with the mark in their environment."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder):
                lines.append(" ".join(process.cmdline()))
    return lines


def test_format_reward_greedy_baseline_and_correction(
    ray_session: object, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path
) -> None:
    """main_ppo_format, with everything that no script uses: remax, filtered groups, rejected tokens, LLDS, GSPO."""
    actor = "actor_rollout_ref.actor"
    status = run_here(
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
