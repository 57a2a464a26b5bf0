"""A key of verl, Search-R1 or TRL is answered with ours, or with why there is none, and never with a far-away key."""

from __future__ import annotations

import re

import pytest
import torch
from omegaconf import OmegaConf
from run_config import run_config

from verl.algorithms.anchor import follow
from verl.config.compose import CONFIG_DIR
from verl.config.foreign import RENAMED, UNSUPPORTED
from verl.config.keys import is_known
from verl.config.schema import Config
from verl.config.sft import load_sft_config
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "it is 'actor_rollout_ref.actor.ppo_micro_batch_size'",
        ),
        ("custom_reward_function.path=mine.py", "here it is 'reward.function', the dotted name of a function or class"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "here it is 'max_turns', one less:"),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=3", "here it is 'max_turns', the number of turns that"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "not supported, because each validation prompt is answered once"),
        ("+actor_rollout_ref.model.use_liger=true", "not supported, because log-probs are computed in chunks"),
        ("ray_init.num_cpus=8", "not supported, because Ray is started on this machine, or RAY_ADDRESS names"),
        ("num_generations=8", "here it is 'actor_rollout_ref.rollout.n_agent'"),
        ("beta=0.04", "here it is 'actor_rollout_ref.actor.kl_loss_coef', with"),
        ("ref_model_mixup_alpha=0.1", "here it is 'algorithm.ref_policy_ema_tau', 1 - alpha:"),
        ("+actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", "not supported, because weights are always kept in"),
        ("critic.megatron.sequence_parallel=true", "not supported, because models are sharded with FSDP2 only"),
        # Only what is spelt alike: these share their section with a key, or a common last name, and nothing else.
        ("actor_rollout_ref.rollout.skip_dump=1", "--help lists all keys"),
        ("somebody.else.path=x", "--help lists all keys"),
        ("trainer.worker_nsight=1", "--help lists all keys"),
        ("actor_rollout_ref.rollout.temprature=1", "did you mean 'actor_rollout_ref.rollout.temperature'?"),
    ],
)
def test_the_answer_to_a_key_that_is_not_ours(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config([override])
    assert answer in str(caught.value)


ENTRIES = {key: ours for key, (ours, _) in RENAMED.items()}
TOLD = {key: how for key, (_, how) in RENAMED.items()} | UNSUPPORTED


@pytest.mark.parametrize("foreign", ENTRIES)
def test_our_name_can_be_set_in_place_of_the_foreign_one(foreign: str) -> None:
    published = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    assert OmegaConf.select(published, ENTRIES[foreign], default=published) is not published
    with pytest.raises(ConfigError, match=f"unknown key '{re.escape(foreign)}': here it is '{ENTRIES[foreign]}'"):
        run_config([f"{foreign}=1"])


@pytest.mark.parametrize("foreign", TOLD)
def test_keys_in_explanations_are_ours_and_the_explained_one_is_not(foreign: str) -> None:
    named = re.findall(r"\b(?:data|actor_rollout_ref|critic|reward|agent|algorithm|trainer)(?:\.\w+)+", TOLD[foreign])
    assert [key for key in named if not is_known(Config, key)] == []
    assert not is_known(Config, foreign)


@pytest.mark.parametrize("tau", [0.0, 0.9])
def test_the_anchor_keeps_one_minus_the_mixup_alpha_of_trl(tau: float) -> None:
    anchor, policy, alpha = torch.tensor([1.0]), torch.tensor([3.0]), 1 - tau
    follow([anchor], [policy], tau)
    assert anchor.item() == pytest.approx(alpha * 3.0 + (1 - alpha) * 1.0)


def test_a_warm_start_is_not_told_the_reasons_of_an_rl_run() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=["data.truncation=left"])
    assert "filter_overlong_prompts" not in str(caught.value)
