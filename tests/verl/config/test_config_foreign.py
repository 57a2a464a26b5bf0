"""A key of verl or TRL is answered with ours, or with why there is none; a far-away key is never suggested."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.config.foreign import RENAMED, UNSUPPORTED
from verl.config.keys import is_known, leaves
from verl.config.schema import Config
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "it is 'actor_rollout_ref.actor.ppo_micro_batch_size'",
        ),
        ("custom_reward_function.path=mine.py", "here it is 'reward.function', a function or class"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "here it is 'max_turns'"),
        ("+actor_rollout_ref.model.lora_rank=8", "not supported, because all weights are trained"),
        ("ray_init.num_cpus=8", "not supported, because RAY_ADDRESS names a cluster"),
        ("num_generations=8", "here it is 'actor_rollout_ref.rollout.n_agent'"),
        ("beta=0.04", "here it is 'actor_rollout_ref.actor.kl_loss_coef', with"),
        # Only what is spelt alike: these share their section with a key, or a common last name, and nothing else.
        ("actor_rollout_ref.rollout.skip_dump=1", "--help lists all keys"),
        ("somebody.else.path=x", "--help lists all keys"),
        ("trainer.worker_nsight=1", "--help lists all keys"),
        ("actor_rollout_ref.rollout.temprature=1", "did you mean 'actor_rollout_ref.rollout.temperature'?"),
    ],
)
def test_the_answer_to_a_key_that_is_not_ours(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [override])
    assert answer in str(caught.value)


def test_the_tables_name_keys_that_are_there_for_keys_that_are_not() -> None:
    assert {ours for ours, _ in RENAMED.values()} <= set(leaves(Config))
    assert [key for key in (*RENAMED, *UNSUPPORTED) if is_known(Config, key)] == []
