"""Settings of the RL algorithm: advantages, where the KL goes, and the EMA anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.sections.fields import count, section, setting, share

SampledKl = (
    Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3plusplus", "k4", "k5"]
    | Literal["kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "k3plusplus+", "k4+", "k5+"]
)
AdvEstimator = Literal[
    "gae",
    "grpo",
    "grpo_turns",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
]


@dataclass
class KlCtrlConfig:
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = setting(
        "fixed", "fixed: a constant coefficient; adaptive: it follows target_kl."
    )
    kl_coef: float = setting(
        0.001, "Coefficient of the KL in the reward (adaptive: its initial value); at 0 there is none.", ge=0
    )
    target_kl: float | None = setting(None, "KL that the adaptive coefficient aims at, in nats per token.", gt=0)
    horizon: int | None = count(None, "Time constant of the adaptive coefficient, in trajectories.")


@dataclass
class StateMaskingConfig:
    """Unused keys of Search-R1's config; changing one is an error."""

    start_state_marker: str = setting("<information>", "Has no effect; changing it is an error that says why.")
    end_state_marker: str = setting("</information>", "Has no effect; changing it is an error that says why.")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): prompts whose trajectories all have the same reward are replaced."""

    enable: bool = setting(False, "Leave such groups out of the update and sample new prompts instead.")
    max_num_gen_batches: int = count(
        10,
        "Maximum number of prompts sampled in a step, as a multiple of data.train_batch_size; after that the step "
        "uses the groups it has.",
    )


@dataclass
class AlgorithmConfig:
    """Advantages, the KL, and the anchor."""

    gamma: float = share(1.0, "Discount per token (gae, reinforce_plus_plus).")
    lam: float = share(1.0, "Lambda of generalised advantage estimation.")
    adv_estimator: AdvEstimator = setting(
        "gae", "Advantage estimator: gae needs a critic; the others compare rewards (verl/algorithms/advantages)."
    )
    gae_over_environment_tokens: bool = setting(
        False, "gae: include retrieved tokens in the recursion, the whitening and the critic's loss, as Search-R1 does."
    )
    no_think_rl: bool = setting(False, "Has no effect and must be false (Search-R1's code refuses it, too).")
    kl_penalty: SampledKl = setting("kl", "KL estimator in the reward.")
    kl_ctrl: KlCtrlConfig = section(KlCtrlConfig)
    state_masking: StateMaskingConfig = section(StateMaskingConfig)
    norm_adv_by_std_in_grpo: bool = setting(True, "grpo: divide by the standard deviation of the group.")
    norm_adv_by_batch_std: bool = setting(
        False, "grpo, reinforce: divide by the standard deviation of the batch; needs norm_adv_by_std_in_grpo=False."
    )
    use_kl_in_reward: bool | None = setting(
        None, "Subtract the KL from the reward; null: true for gae without use_kl_loss (as in Search-R1), else false."
    )
    apply_kl_after_advantage: bool = setting(
        False, "Subtract the KL from the advantages instead of from the rewards; needs use_kl_in_reward."
    )
    use_future_kl_as_reward: bool = setting(
        False, "Subtract the sum of the KL of this and all later tokens; needs apply_kl_after_advantage."
    )
    ref_policy_ema_tau: float = share(
        1.0, "Share of its own weights that the anchor keeps: anchor = tau * anchor + (1 - tau) * actor; 1: frozen."
    )
    ref_policy_ema_update_period: int = count(10, "RL steps between two updates of the anchor.")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    filter_overlong: bool = setting(
        False, "Leave trajectories that reached the length limit out of every loss (they keep their reward)."
    )
