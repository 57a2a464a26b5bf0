"""PPO whose actor and critic train adapters: sampler and trainer agree, the reference is free, and a run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_world import metrics_by_step, run_here, small_run
from safetensors.torch import load_file
from same_runs import assert_same_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # three runs
MODEL, CRITIC = "actor_rollout_ref.model", "critic.model"
LORA = (
    *(f"{MODEL}.lora_rank=8", f"{CRITIC}.lora_rank=4", f"{CRITIC}.target_modules=[q_proj,v_proj]"),
    *("algorithm.adv_estimator=gae", "algorithm.ref_policy_ema_tau=1", "actor_rollout_ref.actor.optim.lr=5e-3"),
    *("actor_rollout_ref.actor.use_rollout_log_probs=false", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0"),
    *("trainer.deterministic=true", "trainer.logger=[]", "trainer.test_freq=1", "trainer.eval_ref_policy_freq=1"),
    *("trainer.total_training_steps=3", "trainer.save_freq=2"),
)


def test_a_run_with_adapters(
    ray_session: object,
    tinywiki: Path,
    policy: Path,
    tinywiki_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(folder: Path, *overrides: str) -> str:
        critic = f"{CRITIC}.path={policy}"
        assert run_here(*small_run(tinywiki, policy, tinywiki_url, folder, critic, *LORA, *overrides)) == 0
        return caplog.text

    caplog.set_level("INFO")
    told = train(tmp_path / "straight")
    assert "policy 0.75 M (0.06 M trained), critic" in told and "anchor" not in told.split("loads ")[1].splitlines()[0]
    steps = metrics_by_step(tmp_path / "straight")
    for step in (1, 2, 3):
        assert steps[step]["health/mismatch/max_abs"] < 1e-4, "the engine has merged what the trainer has trained"
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6 < steps[3]["actor/kl_loss"]
    base = steps[1]["val_ref/test_score/mean"]
    assert all(steps[step]["val_ref/test_score/mean"] == base for step in steps if step), "the reference stays"
    for role, layers in (("actor", 7 * 3), ("critic", 2 * 3)):
        saved = tmp_path / "straight" / role / "global_step_3"
        adapter = load_file(saved / "adapter" / "adapter_model.safetensors")
        assert sum("lora_" in name for name in adapter) == 2 * layers
        learned = [bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name]
        assert role == "critic" or all(learned)  # so weak a policy may have no reward, and a critic then no error
    assert not (tmp_path / "straight" / "ref").exists()

    train(tmp_path / "broken", "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.total_training_steps=3")
    train(tmp_path / "broken", "trainer.resume_mode=auto")
    assert_same_weights(tmp_path / "straight", tmp_path / "broken", 3, {"actor", "critic"})
