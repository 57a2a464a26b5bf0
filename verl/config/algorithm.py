"""Settings of the RL algorithm: advantages, where the KL goes, and the EMA anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.fields import section, setting

SampledKl = (
    Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3plusplus", "k4", "k5"]
    | Literal["kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "k3plusplus+", "k4+", "k5+"]
)
AdvEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo"
]


@dataclass
class KlCtrlConfig:
    """Weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = setting("fixed", "Constant weight, or one that follows target_kl.")
    kl_coef: float = setting(0.001, "Weight of the KL in the reward (the first one, when adaptive).", ge=0)
    target_kl: float | None = setting(None, "KL that the adaptive weight aims at, in nats per token.", gt=0)
    horizon: int | None = setting(None, "Time constant of the adaptive weight, in trajectories.", ge=1)


@dataclass
class StateMaskingConfig:
    """Leftover of the published tree; see the error a change gives."""

    start_state_marker: str = setting("<information>", "Has no effect; see the error it gives.")
    end_state_marker: str = setting("</information>", "Has no effect; see the error it gives.")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): prompts whose trajectories all have the same reward are replaced."""

    enable: bool = setting(False, "Leave such groups out of the update and draw new prompts in their place.")
    max_num_gen_batches: int = setting(
        10,
        "Most prompts of a step, as a multiple of data.train_batch_size; then it goes on with the groups it has.",
        ge=1,
    )


@dataclass
class AlgorithmConfig:
    """Advantages, the KL, and the anchor."""

    gamma: float = setting(1.0, "Discount per token (gae, reinforce_plus_plus).", ge=0, le=1)
    lam: float = setting(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1)
    adv_estimator: AdvEstimator = setting(
        "gae", "Advantage estimator: gae has a critic; the others compare rewards (verl/algorithms/advantages)."
    )
    gae_over_environment_tokens: bool = setting(
        False, "gae: let the recursion, the whitening and the critic go over retrieved tokens too, as published."
    )
    no_think_rl: bool = setting(False, "Not available, in the published code neither; must be False.")
    kl_penalty: SampledKl = setting("kl", "KL estimator in the reward.")
    kl_ctrl: KlCtrlConfig = section(KlCtrlConfig)
    state_masking: StateMaskingConfig = section(StateMaskingConfig)
    norm_adv_by_std_in_grpo: bool = setting(True, "grpo: divide by the standard deviation of the group.")
    norm_adv_by_batch_std: bool = setting(
        False, "grpo, reinforce: divide by the standard deviation of the batch; needs norm_adv_by_std_in_grpo=False."
    )
    use_kl_in_reward: bool | None = setting(
        None, "Subtract the KL from the reward; null: yes for gae without use_kl_loss (as published), else no."
    )
    apply_kl_after_advantage: bool = setting(
        False, "Subtract the KL from the advantages instead of the rewards; needs use_kl_in_reward."
    )
    use_future_kl_as_reward: bool = setting(
        False, "Subtract the sum of this and later tokens' KL; needs apply_kl_after_advantage."
    )
    ref_policy_ema_tau: float = setting(
        1.0, "Share the anchor keeps of itself: anchor = tau * anchor + (1 - tau) * actor; 1: frozen.", ge=0, le=1
    )
    ref_policy_ema_update_period: int = setting(10, "RL steps between two moves of the anchor.", ge=1)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    filter_overlong: bool = setting(
        False, "Leave trajectories that were cut at the length limit out of every loss (they keep their reward)."
    )
