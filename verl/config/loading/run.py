"""Load the configuration of an RL run or of a warm start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from text_file import read_text
from verl.config.loading.compose import compose_tree, load, overridden, typed
from verl.config.rules.objective import leave_out_unused_kl
from verl.config.rules.predicates import has_kl_in_reward
from verl.config.rules.validate import (
    adapter_problems,
    raise_problems,
    resuming_problems,
    schedule_problems,
    validate,
)
from verl.config.sections.fields import leaves
from verl.config.sections.schema import Config, SftConfig
from verl.errors import ConfigError

_FOLLOWS = re.compile(r"\$\{([\w.]+)\}")


def load_config(
    config_name: str = "ppo_trainer", overrides: Iterable[str] = (), config_dir: str | None = None
) -> Config:
    """Compose `config_name` with `overrides`, fill in what follows from other keys, and check it.

    Raises ConfigError naming the key. `check_supported` then says whether this version can train it.
    """
    return completed(load(Config, config_name, overrides, config_dir))


def load_variants(
    config_name: str, overrides: Iterable[str] = (), config_dir: str | None = None
) -> Callable[[Iterable[str]], Config]:
    """A function that gives the config of `config_name` with `overrides` and, behind these, its own. It is what
    `load_config` gives for both, in a fifth of the time: the files and `overrides` are read once.

    Both raise ConfigError naming the key.
    """
    tree = compose_tree(Config, config_name, overrides, config_dir)
    OmegaConf.set_struct(tree, False)  # open mappings get new keys, as in the file of a run
    return lambda more: completed(typed(Config, overridden(Config, tree, more), f"config '{config_name}'"))


def completed(config: Config) -> Config:
    """With the nulls replaced whose value follows from other keys, checked, and without a KL that nothing uses. Raises
    ConfigError naming the key.
    """
    config.algorithm.use_kl_in_reward = has_kl_in_reward(config)
    validate(config)
    leave_out_unused_kl(config)
    return config


def load_sft_config(
    config_name: str = "sft", overrides: Iterable[str] = (), config_dir: str | None = None
) -> SftConfig:
    """Compose `config_name` with `overrides` and check it. Raises ConfigError naming the key."""
    config = load(SftConfig, config_name, overrides, config_dir)
    schedule = schedule_problems(config.optim, "optim")
    raise_problems([*adapter_problems(config.model, "model"), *schedule, *resuming_problems(config.trainer)])
    return config


# Load the configuration that a run left in its folder.


def load_stored_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The config in the file `path` that a run wrote, with `overrides`.

    A file holds no interpolations any more. Where a key still has the value of the one that it follows by default, it
    follows again: an override of `data.max_prompt_length` changes `actor_rollout_ref.rollout.prompt_length` too.
    Settings that the file is older than have their defaults. Raises ConfigError when it is no config of an RL run.
    """
    tree = _read(path)
    _link(tree)
    try:
        completed(typed(Config, tree, str(path)))
    except ConfigError as error:
        raise ConfigError(f"{path} was not written by an RL run of this version: {error}") from error
    return completed(typed(Config, overridden(Config, tree, overrides), str(path)))


def _read(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.create(read_text(path, ConfigError))
    except YAMLError as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, DictConfig) or not {"actor_rollout_ref", "agent", "data"} <= set(tree):
        raise ConfigError(f"{path} was not written by an RL run: it has no actor_rollout_ref, agent and data")
    return tree


def _link(tree: DictConfig) -> None:
    """Put the interpolations back that still hold."""
    for key in leaves(Config).values():
        followed = _FOLLOWS.fullmatch(key.shown or "")
        if followed and _value(tree, key.path) is not None and _value(tree, key.path) == _value(tree, followed[1]):
            OmegaConf.update(tree, key.path, key.shown)


def _value(tree: DictConfig, path: str) -> Any:
    return OmegaConf.select(tree, path)
