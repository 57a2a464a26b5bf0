"""Load the configuration of an RL run or of a warm start."""

from __future__ import annotations

from collections.abc import Iterable

from verl.config.loading.compose import load
from verl.config.rules.predicates import has_kl_in_reward
from verl.config.rules.validate import adapter_problems, raise_problems, validate
from verl.config.sections.schema import Config
from verl.config.sections.sft import SftConfig


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


def load_sft_config(
    config_name: str = "sft", overrides: Iterable[str] = (), config_dir: str | None = None
) -> SftConfig:
    """Compose `config_name` with `overrides` and check it. Raises ConfigError naming the key."""
    config = load(SftConfig, config_name, overrides, config_dir)
    raise_problems(list(adapter_problems(config.model, "model")))
    return config
