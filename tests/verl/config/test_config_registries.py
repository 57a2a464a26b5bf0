"""The names and settings that a config may hold are those that verl.algorithms has: verl.config cannot import torch."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from run_config import run_config

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.algorithms.aggregation import LOSS_AGGREGATIONS
from verl.algorithms.kl import EXACT_KL, SAMPLED_KL_NAMES, TOPK_KL, AdaptiveKL, TopkGradient
from verl.algorithms.policy_loss import POLICY_LOSSES
from verl.algorithms.rollout_correction import Importance, Rejection
from verl.algorithms.traits import ESTIMATOR_TRAITS
from verl.config import CONFIG_DIR, Config
from verl.config.sections.fields import leaves
from verl.errors import ConfigError
from verl.trainer.collapse_guard import CollapseGuard

ACTOR = "actor_rollout_ref.actor"
GUARD = "trainer.collapse_guard"
GUARD_LIMITS = [
    key for key, leaf in leaves(Config).items() if key.startswith(GUARD) and type(None) in get_args(leaf.type)
]


def accepted(key: str) -> set[str]:
    """The strings that the type of a setting allows."""
    return set(literals(leaves(Config)[key].type))


def literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for part in get_args(annotation) for name in literals(part)]


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("algorithm.adv_estimator", ADVANTAGES),
        ("algorithm.adv_estimator", ESTIMATOR_TRAITS),
        ("algorithm.kl_penalty", SAMPLED_KL_NAMES),
        (f"{ACTOR}.kl_loss_type", (*SAMPLED_KL_NAMES, *EXACT_KL)),
        (f"{ACTOR}.kl_loss_type", (*SAMPLED_KL_NAMES, *TOPK_KL)),
        (f"{ACTOR}.kl_topk_gradient", get_args(TopkGradient)),
        (f"{ACTOR}.policy_loss", POLICY_LOSSES),
        (f"{ACTOR}.loss_agg_mode", LOSS_AGGREGATIONS),
        (f"{ACTOR}.rollout_correction.importance", get_args(Importance)),
        (f"{ACTOR}.rollout_correction.reject", get_args(Rejection)),
    ],
)
def test_a_config_accepts_the_registered_names_and_no_other(key: str, known: Any) -> None:
    assert accepted(key) == set(known)


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", f"{ACTOR}.policy_loss", f"{ACTOR}.loss_agg_mode"])
def test_the_readme_lists_every_name(key: str) -> None:
    readme = (CONFIG_DIR.parent / "README.md").read_text(encoding="utf-8")
    assert not [name for name in accepted(key) if f"`{name}`" not in readme]


def advantages(estimator: str, groups: tuple[int, ...] = (0, 0, 1, 1), **settings: Any) -> torch.Tensor:
    """Of four trajectories of two policy tokens and a retrieved one between them, rewarded 1, 0, 3 and 1."""
    reward_T = torch.zeros(12)
    reward_T[2::3] = torch.tensor([1.0, 0.0, 3.0, 1.0])
    given = AdvantageInput(
        reward_T,
        torch.tensor([True, False, True] * 4),
        torch.arange(4).repeat_interleave(3),
        torch.tensor(groups),
        value_T=torch.linspace(0.1, 0.9, 12),
        baseline_B=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        chain_T=torch.ones(12, dtype=torch.bool) if settings.pop("over_environment_tokens", False) else None,
    )
    return ADVANTAGES[estimator](given, AdvantageSettings(**settings)).advantage_T


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_estimators_that_need_groups_are_those_for_which_groups_matter(estimator: str) -> None:
    same = torch.equal(advantages(estimator), advantages(estimator, groups=(0, 1, 2, 3)))
    assert same != ESTIMATOR_TRAITS[estimator].compares_group


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_estimators_that_need_values_or_a_greedy_answer_refuse_to_go_without(estimator: str) -> None:
    """And the others do not read them."""
    traits = ESTIMATOR_TRAITS[estimator]
    mask_T = torch.tensor([True, True])
    bare = AdvantageInput(torch.tensor([0.0, 1.0]), mask_T, torch.tensor([0, 1]), torch.tensor([0, 0]))
    if not (traits.needs_critic or traits.needs_greedy):
        assert len(ADVANTAGES[estimator](bare, AdvantageSettings()).advantage_T) == 2
        return
    with pytest.raises(ValueError, match="needs value_T" if traits.needs_critic else "needs baseline_B"):
        ADVANTAGES[estimator](bare, AdvantageSettings())


@pytest.mark.parametrize("estimator", ADVANTAGES)
@pytest.mark.parametrize(
    ("override", "without", "changed"),
    [
        ("algorithm.gamma=0.5", {}, {"gamma": 0.5}),
        ("algorithm.lam=0.5", {}, {"lam": 0.5}),
        ("algorithm.norm_adv_by_batch_std=true", {"scale": "none"}, {"scale": "batch_std"}),
        ("algorithm.gae_over_environment_tokens=true", {}, {"over_environment_tokens": True}),
    ],
)
def test_a_setting_is_refused_where_it_changes_nothing(
    estimator: str, override: str, without: dict[str, Any], changed: dict[str, Any]
) -> None:
    has_effect = not torch.equal(advantages(estimator, **without), advantages(estimator, **changed))
    overrides = [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n_agent=2", override]
    overrides.append("algorithm.norm_adv_by_std_in_grpo=false")
    if has_effect:
        run_config(overrides)
        return
    with pytest.raises(ConfigError, match="has no effect with algorithm.adv_estimator"):
        run_config(overrides)


@pytest.mark.parametrize(("horizon", "fits"), [(40, False), (41, True)])
def test_a_horizon_is_refused_where_the_controller_would_refuse_it(horizon: int, fits: bool) -> None:
    """200 trajectories a step: 0.2 * 200 = 40."""
    overrides = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1", "data.train_batch_size=200"]
    overrides += [f"{ACTOR}.ppo_mini_batch_size=200", f"algorithm.kl_ctrl.horizon={horizon}"]
    controller = AdaptiveKL(0.1, 0.1, horizon)
    if fits:
        run_config(overrides)
        controller.update(0.1, 200)
        return
    with pytest.raises(ConfigError, match="algorithm.kl_ctrl.horizon"):
        run_config(overrides)
    with pytest.raises(ValueError, match="horizon"):
        controller.update(0.1, 200)


def test_a_guard_without_limits_is_refused() -> None:
    overrides = [f"{GUARD}.action=stop", *(f"{key}=null" for key in GUARD_LIMITS)]
    with pytest.raises(ConfigError, match="has nothing to watch"):
        run_config(overrides)


@pytest.mark.parametrize("limit", GUARD_LIMITS)
def test_one_limit_is_enough_for_config_and_guard(limit: str) -> None:
    value = 5 if limit.endswith("steps") else 0.5
    overrides = [f"{GUARD}.action=stop", *(f"{key}=null" for key in GUARD_LIMITS), f"{limit}={value}"]
    overrides.append("actor_rollout_ref.rollout.n_agent=2")  # groups, for a limit on them
    CollapseGuard(run_config(overrides).trainer.collapse_guard)
