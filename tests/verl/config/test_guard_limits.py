"""A limit of the collapse guard that no step can cross is refused; where it is accepted, steps have its metric."""

from __future__ import annotations

import pytest
from run_config import run_config

from verl.errors import ConfigError

GUARD = "trainer.collapse_guard"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n_agent=4")
KL_LOSS = f"{ACTOR}.use_kl_loss=true"
SAMPLERS = f"{ACTOR}.use_rollout_log_probs=true"  # with 16 optimizer steps a step
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=4096"
TOP_K = (KL_LOSS, f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=8")
OWN_REWARD = "reward.function=search_r1.rewards.exact_match.SubstringMatchReward"
MISMATCH, MAX_KL, GROUPS = f"{GUARD}.max_mismatch=0.1", f"{GUARD}.max_kl=0.1", f"{GUARD}.max_zero_variance_groups=0.9"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*GRPO, MAX_KL), "max_kl=0.1 can never be crossed: there is no KL to the anchor"),
        ((MAX_KL, "algorithm.use_kl_in_reward=false"), "there is no KL to the anchor"),
        ((*GRPO, MISMATCH, SAMPLERS), "max_mismatch=0.1 can never be crossed: the trainer computes no log-probs"),
        ((*GRPO, MISMATCH, SAMPLERS, ONE_STEP, f"{ACTOR}.ppo_epochs=2"), "the trainer computes no log-probs"),
        ((MISMATCH, SAMPLERS, f"{ACTOR}.ppo_mini_batch_size=1024", "trainer.critic_warmup=2"), "computes no log-probs"),
        ((*GRPO, MISMATCH, SAMPLERS, KL_LOSS), "the trainer computes no log-probs"),
        ((*GRPO, MISMATCH, f"{ROLLOUT}.top_p=0.95"), "differ by what is cut off"),
        ((*GRPO, MISMATCH, f"{ROLLOUT}.top_k=50"), "differ by what is cut off"),
        ((GROUPS,), "max_zero_variance_groups=0.9 can never be crossed: a prompt has one trajectory"),
        ((f"{GUARD}.min_reward=0",), "min_reward=0 can never be crossed: no score of search_r1.rewards.exact_match"),
        ((f"{GUARD}.min_reward=-1",), "is below 0"),
        ((f"{GUARD}.max_score_drop=1",), "max_score_drop=1 can never be crossed: scores of"),
        ((f"{GUARD}.min_entropy=0",), f"{GUARD}.min_entropy"),
    ],
)
def test_a_limit_that_no_step_can_cross_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1, "one contradiction, one message"


@pytest.mark.parametrize(
    "overrides",
    [
        (*GRPO, MAX_KL, KL_LOSS),
        (*GRPO, MAX_KL, KL_LOSS, f"{ACTOR}.kl_loss_coef=0"),  # measured only
        (MAX_KL,),  # gae: a KL in the reward
        (*GRPO, MAX_KL, "algorithm.use_kl_in_reward=true"),
        (*GRPO, MISMATCH),
        (*GRPO, MISMATCH, SAMPLERS, ONE_STEP),
        (*GRPO, MISMATCH, SAMPLERS, *TOP_K),
        (MISMATCH, "trainer.critic_warmup=2"),
        (*GRPO, GROUPS),
        (GROUPS, f"{ROLLOUT}.n_agent=2"),
        (f"{GUARD}.min_reward=0.01", f"{GUARD}.max_score_drop=0.5", f"{GUARD}.min_entropy=0.1"),
        (f"{GUARD}.min_reward=-1", f"{GUARD}.max_score_drop=2", OWN_REWARD),
        (f"{GUARD}.max_empty_think_ratio=0.5", f"{GUARD}.max_grad_norm=5", f"{GUARD}.max_entropy=5"),
        (*GRPO, MAX_KL, f"{GUARD}.action='off'"),
        (*GRPO, MAX_KL, "trainer.val_only=true"),
    ],
)
def test_a_limit_that_a_step_can_cross_is_accepted(overrides: tuple[str, ...]) -> None:
    run_config(overrides)
