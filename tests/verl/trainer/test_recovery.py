"""What a run does about an alarm: the checkpoint named, the weights put back, the learning rate halved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ENV, ROOT, metrics_by_step
from preflight_run import small_run
from run_config import run_config

from verl.algorithms.kl import AdaptiveKL, FixedKL, KLController
from verl.config import Config
from verl.config.sections.trainer import CollapseGuardConfig
from verl.errors import TrainingCollapsed
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.run.checkpoints import Checkpoints
from verl.tracking.spans import Timer
from verl.trainer.collapse_guard import Recovery, compares_first_step
from verl.trainer.estimates import Estimator
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.metrics.health import health_metrics

RUN = Path("run")


class Role:
    """Writes down what the trainer asks of an actor or a critic."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, *args, *options.values()))


def recovery(action: str, **settings: Any) -> tuple[Recovery, Role, Role]:
    actor, critic = Role(), Role()
    checkpoints = Checkpoints(RUN, actor, critic, with_anchor=True)  # type: ignore[arg-type]
    config = CollapseGuardConfig(action=action, patience=2, max_repetition=0.5, **settings)  # type: ignore[arg-type]
    return Recovery(config, checkpoints, AdaptiveKL(0.001, 0.1, 100)), actor, critic


def watch(recovery: Recovery, metrics: dict[str, float], step: int) -> int | None:
    recovery.watch(metrics, step)
    return recovery.act(step)


GOOD, BAD = {"health/repetition": 0.1}, {"health/repetition": 0.9}


def test_warn_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    guard, actor, _ = recovery("warn")
    assert [watch(guard, BAD, step) for step in (1, 2)] == [None, None]
    assert "step 2" in caplog.text and "max_repetition" in caplog.text and not actor.calls


def test_a_limit_without_its_metric_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the thoughts of an environment that does not report them."""
    guard, _, _ = recovery("stop", max_empty_think_ratio=0.5)
    for step in range(1, 9):
        watch(guard, GOOD, step)
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.collapse_guard.max_empty_think_ratio is not watched: no step so far has had health/empty_think_ratio"
    ]


def test_stop_names_the_last_good_checkpoint() -> None:
    guard, _, _ = recovery("stop")
    for step, metrics in enumerate([GOOD, GOOD, GOOD, GOOD, BAD], start=1):
        if step in (2, 4):
            guard.checkpoints.save(step)
        assert watch(guard, metrics, step) is None
    guard.checkpoints.save(5)
    # Step 5's metrics are those of the weights of step 4, so step 2 is the last good one.
    with pytest.raises(TrainingCollapsed, match=r"step 6: max_repetition.*run/actor/global_step_2\."):
        watch(guard, BAD, 6)


def test_stop_without_a_checkpoint_says_so() -> None:
    guard, _, _ = recovery("stop")
    watch(guard, BAD, 1)
    with pytest.raises(TrainingCollapsed, match="set trainer.save_freq"):
        watch(guard, BAD, 2)


def test_rollback_puts_every_role_back_and_halves_the_learning_rate() -> None:
    guard, actor, critic = recovery("rollback")
    guard.checkpoints.save(2)
    guard.checkpoints.save(5)
    actor.calls.clear()
    critic.calls.clear()
    assert watch(guard, BAD, 6) is None
    assert watch(guard, BAD, 7) == 2, "step 5 has the weights that step 6 sampled with"
    folder = "global_step_2"
    assert actor.calls == [
        ("load", RUN / "actor" / folder, None),
        ("load", RUN / "ref" / folder, "anchor"),
        ("scale_lr", 0.5),
    ]
    assert critic.calls == [("load", RUN / "critic" / folder, None), ("scale_lr", 0.5)]
    assert guard.checkpoints.steps == [2], "what was saved after the good step is no longer one to go back to"


def test_after_enough_rollbacks_the_run_ends() -> None:
    guard, _, _ = recovery("rollback", max_rollbacks=1)
    guard.checkpoints.save(1)
    assert [watch(guard, BAD, step) for step in (3, 4)] == [None, 1]
    watch(guard, BAD, 5)
    with pytest.raises(TrainingCollapsed):
        watch(guard, BAD, 6)


RESUMED_KL = {
    "adaptive": (AdaptiveKL(0.001, 0.1, 100), {"kl_coef": 0.001}, 0.03, 0.02),
    "adaptive, of a state without its coefficient": (AdaptiveKL(0.001, 0.1, 100), {}, 0.03, 0.02),
    "adaptive, from another coefficient": (AdaptiveKL(0.05, 0.1, 100), {"kl_coef": 0.001}, 0.05, 0.05),
    "fixed": (FixedKL(0.05), {"kl_coef": 0.001}, 0.05, 0.05),
    "fixed, of a state without its coefficient": (FixedKL(0.05), {}, 0.05, 0.05),
}


@pytest.mark.parametrize(("weight", "saved", "resumed", "rolled_back"), RESUMED_KL.values(), ids=RESUMED_KL)
def test_the_kl_weight_of_a_resumed_run(
    weight: KLController, saved: dict[str, float], resumed: float, rolled_back: float
) -> None:
    """The state of step 3 has a weight of 0.03, which was 0.02 at step 2."""
    checkpoints = Checkpoints(RUN, Role(), None, with_anchor=False)  # type: ignore[arg-type]
    checkpoints.steps, checkpoints.kl_weights = [2, 3], {2: 0.02, 3: 0.03}
    config = CollapseGuardConfig(action="rollback", patience=2, max_repetition=0.5)
    guard = Recovery(config, checkpoints, weight)
    guard.resume({"kl_weight": 0.03, "guard": guard.guard.state_dict()} | saved)
    assert guard.kl_weight.value == resumed
    # A run that was not interrupted has the weight of each saved step, too.
    assert checkpoints.kl_weights == {2: rolled_back, 3: resumed}
    if isinstance(weight, AdaptiveKL):
        weight.value = 0.7  # as the KL of the policy that collapses has it
    assert [watch(guard, BAD, step) for step in (4, 5)] == [None, 2]
    assert guard.kl_weight.value == rolled_back


def sampled(rewards: list[float], per_prompt: int) -> list[Trajectory]:
    """Trajectories of a prompt, a policy turn of two tokens each."""
    prompt = Prompt((1, 2), "test", {})
    found = []
    for row, reward in enumerate(rewards):
        turn = Segment(Source.POLICY, (3, 4 + row), (-1.0, -2.0))
        segments = [Segment(Source.PROMPT, prompt.ids), turn]
        found.append(Trajectory(str(row // per_prompt), prompt, segments, Status.ANSWERED, reward=reward))
    return found


def step_of(config: Config, rewards: list[float]) -> dict[str, float]:
    """What the loop logs of a step that sampled these rewards, but for what the update itself reports."""
    trajectories = sampled(rewards, config.actor_rollout_ref.rollout.n_agent)
    batch = TrainBatch.from_trajectories(trajectories)
    metrics = Estimator(config).prepare(batch, None, None, Timer())  # type: ignore[arg-type]
    # the gradient of a KL or an entropy bonus
    return metrics | step_metrics(trajectories, batch) | health_metrics(trajectories, batch) | {"actor/grad_norm": 0.3}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce", "reinforce_plus_plus"])
def test_a_reward_that_is_always_the_same_is_warned_of(
    estimator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the default settings, and a float32 reward whose mean over eight is not exact."""
    config = run_config(
        [
            f"algorithm.adv_estimator={estimator}",
            "actor_rollout_ref.rollout.n_agent=8",
            "actor_rollout_ref.actor.use_rollout_log_probs=true",
        ]
    )
    dead, alive = step_of(config, [0.8] * 16), step_of(config, [0.8] * 15 + [0.0])
    checkpoints = Checkpoints(tmp_path, Role(), None, with_anchor=False)  # type: ignore[arg-type]
    loop = Recovery(config.trainer.collapse_guard, checkpoints, FixedKL(0.001))
    logged = []
    for step in range(1, 202):
        metrics = alive if step == 1 else dead
        logged.append(metrics | loop.watch(metrics, step))
        assert loop.act(step) is None
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 21", "step 41", "step 81", "step 161"]
    assert all("every trajectory had the same reward, 0.8" in line for line in lines)
    assert all("every advantage was 0" in line and "since step 2" in line for line in lines)
    assert logged[200]["health/guard/dead_run_steps"] == 200
    assert [step for step, row in enumerate(logged, 1) if row["health/guard/alarm"]] == [21, 41, 81, 161]


# The first step on GPUs.

MISMATCH = "health/mismatch/mean_abs"


def first_step(metrics: dict[str, float], device: str = "cuda", **settings: Any) -> Recovery:
    """What watches a run on `device`, once it has acted on a first step with `metrics`."""
    config = CollapseGuardConfig(**settings)
    checkpoints = Checkpoints(RUN, Role(), None, with_anchor=False)  # type: ignore[arg-type]
    found = Recovery(config, checkpoints, FixedKL(0.0), compares_first_step(config, device))
    watch(found, metrics, 1)
    return found


@pytest.mark.parametrize("action", ["warn", "stop"])
@pytest.mark.parametrize("mismatch", [0.11, 3.0, float("nan")])
def test_a_first_step_on_gpus_with_two_policies_ends_the_run(mismatch: float, action: str) -> None:
    with pytest.raises(TrainingCollapsed, match=r"step 1: .*do not have the same policy.* nats") as caught:
        first_step({MISMATCH: mismatch}, action=action)
    for word in ("weight sync", "rollout.dtype", "chat template and RoPE", "quantized", "attention backends"):
        assert word in str(caught.value)


def test_only_the_first_step_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Later ones differ for other reasons too, and are watched with a limit of one's own."""
    found = first_step({MISMATCH: 0.02})
    assert watch(found, {MISMATCH: 3.0}, 2) is None and not caplog.records


@pytest.mark.parametrize(
    ("device", "settings"), [("cpu", {}), ("cuda", {"action": "off"}), ("cuda", {"max_mismatch": 5.0})]
)
def test_a_first_step_that_is_not_compared(
    device: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Not where the guard is off, nor where a limit is given: that one counts, with its patience."""
    first_step({MISMATCH: 3.0}, device, **settings)
    assert not caplog.records


def test_a_limit_of_ones_own_is_watched_with_its_patience() -> None:
    found = first_step({MISMATCH: 3.0}, max_mismatch=0.5, action="stop", patience=2)
    with pytest.raises(TrainingCollapsed, match="step 2: max_mismatch"):
        watch(found, {MISMATCH: 3.0}, 2)


@pytest.mark.parametrize(
    ("metrics", "why"), [({}, f"no {MISMATCH}"), ({MISMATCH: 3.0, "rollout/staleness/max": 1.0}, "older weights")]
)
def test_a_first_step_that_cannot_tell_is_a_warning(
    metrics: dict[str, float], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    first_step(metrics)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and why in caplog.text


PROGRAM = """
import pathlib, sys
from verl.trainer import main_ppo, starting
starts = pathlib.Path("starts")
starts.write_text((starts.read_text() if starts.exists() else "") + "start ")
starting.compares_first_step = lambda guard, device: True  # as on a GPU
sys.exit(main_ppo.main())
"""
ENVIRONMENT = """
from verl.agent.environment import Environment, Outcome
class Ends(Environment):
    async def step(self, prompt, text, tools_allowed):
        return Outcome("answer", valid=True, done=True)
"""
# The engine says that it has the trainer's weights, and keeps those that it was started with.
BREAKS_THE_SYNC = """
from verl.rollout.engine import VLLMEngine
async def load_nothing(self, exported):
    if exported.index + 1 == exported.count:
        await self._loaded(exported.version)
VLLMEngine.load_weights = load_nothing
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_broken", [True, False])
def test_a_sync_that_brings_no_weights_ends_the_run_and_is_not_tried_again(
    is_broken: bool, prompt_file: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "their_env.py").write_text(ENVIRONMENT + BREAKS_THE_SYNC * is_broken)
    settings = small_run(
        prompt_file, tmp_path / "run", tiny_model_dir, "agent.environment=their_env.Ends", "max_turns=1",
        "trainer.total_training_steps=1", "data.max_response_length=8",
        "trainer.val_before_train=false", "actor_rollout_ref.rollout.kv_cache_gib=0.125",
        "actor_rollout_ref.rollout.num_threads=1", "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.load_format=dummy",
    )  # fmt: skip
    supervisor = ["bash", str(ROOT / "scripts" / "run_with_restart.sh"), "--backoff_s", "0", "--"]
    command = [*supervisor, sys.executable, "program.py", *settings]
    there = {"cwd": tmp_path, "env": ENV | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, **there, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == (2 if is_broken else 0), done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "starts").read_text() == "start "
    assert ("do not have the same policy" in done.stderr) == is_broken
    words = "CPU_ATTN in the rollout engine, PyTorch's scaled_dot_product_attention, row by row in the trainer"
    assert done.stderr.count(f"attention: {words}") == 1
    mismatch = metrics_by_step(tmp_path / "run")[1][MISMATCH]
    assert mismatch > 0.1 if is_broken else mismatch < 1e-4
