"""`.venv/bin/python -m verl.trainer.main_ppo_format key=value ...`: main_ppo with the format reward.

Training rewards also the form of a trajectory, by `reward_model.structure_format_score`, `final_format_score` and
`retrieval_score`; validation counts exact matches alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from verl.config import Config, RewardConfig
from verl.errors import ConfigError
from verl.trainer.main_ppo import main

FORMAT_REWARD = "search_r1.rewards.format_reward.FormatReward"
COEFFICIENTS = ("structure_format_score", "final_format_score", "retrieval_score")


def asks_for_format_reward(config: Config) -> bool:
    """Whether it has settings that main_ppo refuses."""
    return any(getattr(config.reward_model, name) for name in COEFFICIENTS)


def with_format_reward(config: Config) -> Config:
    """The same run, scored by the format reward. Raises ConfigError when the config names another reward."""
    if config.reward != RewardConfig():
        raise ConfigError("main_ppo_format brings its own reward: leave out reward.*, or use verl.trainer.main_ppo")
    coefficients = {name: getattr(config.reward_model, name) for name in COEFFICIENTS}
    reward = RewardConfig(FORMAT_REWARD, kwargs=coefficients, val_kwargs={})
    taken = replace(config.reward_model, structure_format_score=0.0, final_format_score=0.0, retrieval_score=0.0)
    return replace(config, reward=reward, reward_model=taken)


if __name__ == "__main__":
    sys.exit(main(adapt=with_format_reward))
