"""A KL with coefficient 0: no reference is loaded for it, unless something else reads it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from run_config import run_config

from verl.config.loading.run import load_stored_config
from verl.config.rules.predicates import has_anchor, has_kl_in_reward, needs_ref_log_probs, policy_topk
from verl.tracking.tracker import settings_text

ACTOR = "actor_rollout_ref.actor"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=4")
IN_LOSS, IN_REWARD = f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
TOPK = (f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=32", "algorithm.ref_policy_ema_tau=0.9")
ADAPTIVE = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1", "algorithm.kl_ctrl.horizon=100000")
WATCHED = ("trainer.collapse_guard.action=stop", "trainer.collapse_guard.max_kl=1")


@pytest.mark.parametrize(
    ("kl", "zero"),
    [
        ((*GRPO, IN_LOSS), f"{ACTOR}.kl_loss_coef=0"),
        ((*GRPO, IN_LOSS, *TOPK), f"{ACTOR}.kl_loss_coef=0"),
        (
            (*GRPO, IN_LOSS, f"{ACTOR}.use_kl_iw=true", "actor_rollout_ref.ref.log_probs=score"),
            f"{ACTOR}.kl_loss_coef=0",
        ),
        (("algorithm.adv_estimator=gae", IN_LOSS), f"{ACTOR}.kl_loss_coef=0"),
        (("algorithm.adv_estimator=gae",), "algorithm.kl_ctrl.kl_coef=0"),
        ((*GRPO, IN_REWARD, *ADAPTIVE), "algorithm.kl_ctrl.kl_coef=0"),
    ],
)
def test_without_a_weight_there_is_no_reference(kl: tuple[str, ...], zero: str, tmp_path: Path) -> None:
    assert has_anchor(run_config([*kl]))
    config = run_config([*kl, zero])
    assert not has_anchor(config) and not has_kl_in_reward(config)
    assert not needs_ref_log_probs(config) and not policy_topk(config.actor_rollout_ref.actor)
    assert has_anchor(run_config([*kl, zero, *WATCHED])), "the guard watches it"
    assert has_anchor(run_config([*kl, zero, "trainer.eval_ref_policy_freq=2"])), "validation reads it"

    (tmp_path / "config.yaml").write_text(settings_text(asdict(config)))
    assert load_stored_config(tmp_path / "config.yaml") == config
