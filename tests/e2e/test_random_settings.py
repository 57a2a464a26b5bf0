"""Settings that are drawn at random: a run says which of them do not go together, and one that is resumed in the middle
goes on as if nothing had happened.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from e2e_world import run_here, small_run
from same_runs import assert_same_trajectories, assert_same_weights, learned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # two runs each
STEPS = 4
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# Every trajectory of so weak a policy has a reward of its own.
REWARD = (
    "reward.function=search_r1.rewards.composite.CompositeReward",
    "reward.kwargs={weights: {f1: 1.0, valid_format: 0.5, search_cost: -0.2, repeated_query: -0.1}}",
)
FIXED = (
    *REWARD,
    "trainer.deterministic=true",
    "trainer.logger=[]",
    "trainer.save_freq=2",
    f"trainer.total_training_steps={STEPS}",
    "+trainer.val_before_train=false",
    "data.val_data_num=4",
)
# What a setting has by default is there as well, and twice where most of the other values need further settings.
VALUES: dict[str, tuple[object, ...]] = {
    "algorithm.adv_estimator": ("grpo", "rloo", "reinforce", "reinforce_plus_plus_baseline", "remax", "opo", "gae"),
    "algorithm.filter_groups.enable": (False, True),
    "algorithm.filter_overlong": (False, True),
    "algorithm.norm_adv_by_std_in_grpo": (True, False),
    "algorithm.ref_policy_ema_tau": (0.9, 1.0),
    "algorithm.ref_policy_ema_update_period": (1, 2),
    "data.curriculum.enable": (False, True),
    "data.train_batch_size": (6, 3),
    "trainer.collapse_guard.action": ("warn", "rollback"),
    "trainer.critic_warmup": (0, 0, 1),
    "trainer.eval_ref_policy_freq": (-1, 2),
    "trainer.n_gpus_per_node": (1, 2),
    "trainer.test_freq": (-1, 2),
    "agent.max_invalid_turns": ("null", 1),
    f"{ACTOR}.entropy_coeff": (0.0, 0.01),
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": ("float32", "bfloat16"),
    f"{ACTOR}.fsdp_config.optimizer_offload": (False, True),
    f"{ACTOR}.fsdp_config.param_offload": (False, True),
    f"{ACTOR}.fsdp_config.reduce_gradients": ("micro_batch", "mini_batch"),
    f"{ACTOR}.head_chunk_tokens": ("null", 64),
    f"{ACTOR}.kl_loss_type": ("full_reverse", "full_forward", "low_var_kl", "k5", "k1+"),
    f"{ACTOR}.kl_topk_tokens": ("null", "null", 8),
    f"{ACTOR}.llds_coef": (0.0, 0.1),
    f"{ACTOR}.loss_agg_mode": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    f"{ACTOR}.old_log_probs": ("auto", "score", "update"),
    f"{ACTOR}.policy_loss": ("ppo", "ppo", "gspo", "cispo", "reinforce"),
    f"{ACTOR}.ppo_epochs": (1, 2),
    f"{ACTOR}.ppo_mini_batch_size": (12, 7),
    f"{ACTOR}.rollout_correction.importance": ("none", "none", "token", "sequence"),
    f"{ACTOR}.rollout_correction.reject": ("none", "none", "token", "geometric"),
    f"{ACTOR}.shuffle": (False, True),
    f"{ACTOR}.use_dynamic_bsz": (True, False),
    f"{ACTOR}.use_kl_loss": (True, False),
    f"{ACTOR}.use_prefix_grouper": (True, False),
    f"{ACTOR}.use_rollout_log_probs": (True, False),
    f"{MODEL}.enable_gradient_checkpointing": (False, True),
    f"{MODEL}.lora_rank": (0, 8),
    f"{MODEL}.trained_layers": ("null", 1),
    f"{MODEL}.use_remove_padding": (True, False),
    f"{ROLLOUT}.load_format": ("null", "dummy"),
    f"{ROLLOUT}.num_engines": (1, 2),
    f"{ROLLOUT}.temperature": (1.0, 0.8),
    f"{ROLLOUT}.top_p": (1.0, 0.9),
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    seed: int, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    chosen = {key: rng.choice(VALUES[key]) for key in rng.sample(sorted(VALUES), 16)}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def train(folder: Path, *more: str) -> int:
        own = [f"{key}={value}" for key, value in chosen.items()]
        critic = f"critic.model.path={policy}"
        return run_here(*small_run(tinywiki, policy, tinywiki_url, folder, critic, *FIXED, *own, *more))

    # A refusal names what does not fit, which is left out.
    while (status := train(straight)) == 2:
        said = capsys.readouterr().err
        words = re.findall(r"[\w.]*\w", said)  # a key, the end of one, or the section that it is in
        named = [k for k in chosen if any(k.endswith(f".{word}") or f"{k}.".startswith(f"{word}.") for word in words)]
        assert named, said
        for key in named:
            del chosen[key]
    assert status == 0

    state = straight / "state" / "global_step_2"
    assert train(resumed, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={state}") == 0
    metrics, again = learned(straight), learned(resumed)
    assert {step: again[step] for step in (3, STEPS)} == {step: metrics[step] for step in (3, STEPS)}, chosen
    assert any(metrics[step]["actor/grad_norm"] > 0 for step in metrics if "actor/grad_norm" in metrics[step])
    assert_same_trajectories(straight, resumed, (3, STEPS))
    assert_same_weights(straight, resumed, STEPS, {"actor"})
