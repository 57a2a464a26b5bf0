"""Load the configuration of an RL run."""

from __future__ import annotations

from collections.abc import Iterable

from verl.config.compose import load
from verl.config.schema import Config
from verl.config.validate import validate


def load_config(
    config_name: str = "ppo_trainer", overrides: Iterable[str] = (), config_dir: str | None = None
) -> Config:
    """Compose `config_name` with `overrides`, fill in what follows from other keys, and check it.

    Raises ConfigError naming the key. `check_supported` then says whether this version can train it.
    """
    config = load(Config, config_name, overrides, config_dir)
    _fill_in(config)
    validate(config)
    return config


def _fill_in(config: Config) -> None:
    """Replace the nulls whose value follows from other keys."""
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward is None:
        without_kl_loss = not config.actor_rollout_ref.actor.use_kl_loss
        algorithm.use_kl_in_reward = algorithm.adv_estimator == "gae" and without_kl_loss
