"""Asynchronous RL: what it needs, what it cannot go with, and what is doubtful about it."""

from __future__ import annotations

import pytest
from run_config import run_config

from verl.config import Config
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.predicates import max_staleness
from verl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
CORRECTION = f"{ACTOR}.rollout_correction"
SPLIT = ("trainer.layout=split", "trainer.rollout_gpus_per_node=4")
ONE_STEP_OFF = "trainer.async_rollout=one_step_off"
OVER_SAMPLE = "actor_rollout_ref.rollout.over_sample=0.5"
BOUNDED = "trainer.async_rollout=bounded"
ONE_UPDATE = (f"{ACTOR}.ppo_mini_batch_size=4096", f"{ACTOR}.policy_loss=reinforce")


def config_of(*overrides: str) -> Config:
    return run_config(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=4", *overrides])


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ((), 0),
        (("trainer.async_rollout=off",), 0),
        ((ONE_STEP_OFF, *SPLIT), 1),
        ((ONE_STEP_OFF, "trainer.max_staleness=1", *SPLIT), 1),
        ((BOUNDED, "trainer.max_staleness=3", *SPLIT), 3),
        ((ONE_STEP_OFF, "trainer.device=cpu"), 1),  # engines on CPU are processes of their own
        ((ONE_STEP_OFF, "trainer.layout=split", "actor_rollout_ref.rollout.nnodes=2"), 1),
        ((OVER_SAMPLE,), 1),
        ((OVER_SAMPLE, "trainer.max_staleness=3"), 3),
        ((OVER_SAMPLE, ONE_STEP_OFF, *SPLIT), 2),
        ((OVER_SAMPLE, BOUNDED, "trainer.max_staleness=4", *SPLIT), 4),
    ],
)
def test_how_old_weights_may_be(overrides: tuple[str, ...], most: int) -> None:
    assert max_staleness(config_of(*overrides)) == most


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.max_staleness=2",), "trainer.max_staleness=2 has no effect with trainer.async_rollout=off"),
        ((ONE_STEP_OFF, "trainer.max_staleness=2", *SPLIT), "one_step_off means trainer.max_staleness=1, not 2"),
        ((BOUNDED, *SPLIT), "bounded needs trainer.max_staleness"),
        ((ONE_STEP_OFF,), "with trainer.layout=colocated both take turns on the same GPUs: set trainer.layout=split"),
        (
            (ONE_STEP_OFF, *SPLIT, "trainer.deterministic=true"),
            "trainer.async_rollout=one_step_off and trainer.deterministic=True exclude each other",
        ),
        (
            (OVER_SAMPLE, "trainer.deterministic=true"),
            "actor_rollout_ref.rollout.over_sample=0.5 and trainer.deterministic=True exclude each other",
        ),
        ((OVER_SAMPLE, BOUNDED, "trainer.max_staleness=1", *SPLIT), "needs trainer.max_staleness=2 or more"),
        ((OVER_SAMPLE, ONE_STEP_OFF, "trainer.max_staleness=1", *SPLIT), "means trainer.max_staleness=2, not 1"),
        (("actor_rollout_ref.rollout.over_sample=1.5",), "actor_rollout_ref.rollout.over_sample"),
        ((BOUNDED, "trainer.max_staleness=0", *SPLIT), "trainer.max_staleness"),
        (("trainer.async_rollout=two_steps_off",), "trainer.async_rollout"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1, "one contradiction, one message"


@pytest.mark.parametrize("overrides", [(), ONE_UPDATE, (f"{ACTOR}.use_rollout_log_probs=true", *ONE_UPDATE)])
def test_old_weights_without_a_correction_are_warned_of(overrides: tuple[str, ...]) -> None:
    [doubt] = config_warnings(config_of(OVER_SAMPLE, *overrides))
    assert "over_sample=0.5 trains on samples of older weights, and nothing corrects for that" in doubt
    [doubt] = config_warnings(config_of(ONE_STEP_OFF, *SPLIT, *overrides))
    assert f"nothing corrects for that: set {CORRECTION}.importance=token" in doubt
    assert list(config_warnings(config_of(ONE_STEP_OFF, *SPLIT, *overrides, "trainer.val_only=true"))) == []


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{CORRECTION}.importance=token",),
        (f"{CORRECTION}.importance=sequence", *ONE_UPDATE),
        (f"{ACTOR}.use_rollout_log_probs=true",),  # the ratio of the loss is to the weights that sampled
    ],
)
def test_no_doubt_about_a_run_that_corrects(overrides: tuple[str, ...]) -> None:
    assert list(config_warnings(config_of(ONE_STEP_OFF, *SPLIT, *overrides))) == []


@pytest.mark.parametrize("staleness", [(OVER_SAMPLE,), (ONE_STEP_OFF, *SPLIT)])
@pytest.mark.parametrize(
    ("kl", "warned"),
    [
        (("kl_loss_type=low_var_kl",), True),
        (("kl_loss_type=full_reverse", "kl_topk_tokens=32"), True),
        (("kl_loss_type=low_var_kl", "use_kl_iw=true"), False),
        (("kl_loss_type=full_reverse", "kl_topk_tokens=32", "use_kl_iw=true"), False),
        (("kl_loss_type=full_reverse",), False),  # exact: no part of it depends on the sampled token
        (("kl_loss_type=full_reverse", "kl_topk_tokens=32", "kl_use_tail_sampling=false"), False),
        (("kl_loss_type=low_var_kl", "kl_loss_coef=0"), False),
    ],
)
def test_a_kl_estimated_from_old_tokens_is_warned_of(
    staleness: tuple[str, ...], kl: tuple[str, ...], warned: bool
) -> None:
    settings = (*staleness, f"{CORRECTION}.importance=token", f"{ACTOR}.use_kl_loss=true")
    found = list(config_warnings(config_of(*settings, *(f"{ACTOR}.{part}" for part in kl))))
    assert len(found) == warned
    assert not warned or f"nothing corrects for that: set {ACTOR}.use_kl_iw=True" in found[0]
