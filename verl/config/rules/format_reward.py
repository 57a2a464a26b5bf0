"""The run that `verl.trainer.main_ppo_format` makes of its settings: scored by the format reward."""

from __future__ import annotations

from dataclasses import replace

from verl.config.sections.agent import RewardConfig
from verl.config.sections.schema import Config
from verl.errors import ConfigError

FORMAT_REWARD = "search_r1.rewards.format_reward.FormatReward"
COEFFICIENTS = ("structure_format_score", "final_format_score", "retrieval_score")


def asks_for_format_reward(config: Config) -> bool:
    """Whether the config has coefficients of the format reward, which main_ppo refuses."""
    return any(getattr(config.reward_model, name) for name in COEFFICIENTS)


def with_format_reward(config: Config) -> Config:
    """A copy of `config` that the format reward scores. Raises ConfigError when `config` names another reward."""
    if config.reward != RewardConfig():
        raise ConfigError("main_ppo_format brings its own reward: leave out reward.*, or use verl.trainer.main_ppo")
    coefficients = {name: getattr(config.reward_model, name) for name in COEFFICIENTS}
    reward = RewardConfig(FORMAT_REWARD, kwargs=coefficients, val_kwargs={})
    taken = replace(config.reward_model, structure_format_score=0.0, final_format_score=0.0, retrieval_score=0.0)
    return replace(config, reward=reward, reward_model=taken)
