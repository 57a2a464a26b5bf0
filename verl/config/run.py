"""Load the configuration of an RL run."""

from __future__ import annotations

from collections.abc import Iterable

from verl.config.compose import load
from verl.config.predicates import has_kl_in_reward
from verl.config.schema import Config
from verl.config.validate import validate


def load_config(
    config_name: str = "ppo_trainer", overrides: Iterable[str] = (), config_dir: str | None = None
) -> Config:
    """Compose `config_name` with `overrides`, fill in what follows from other keys, and check it.

    Raises ConfigError naming the key. `check_supported` then says whether this version can train it.
    """
    return completed(load(Config, config_name, overrides, config_dir))


def completed(config: Config) -> Config:
    """With the nulls replaced whose value follows from other keys, and checked. Raises ConfigError naming the key."""
    config.algorithm.use_kl_in_reward = has_kl_in_reward(config)
    validate(config)
    return config
