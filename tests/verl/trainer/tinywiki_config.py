"""The config "tinywiki" for tests that are about something else than how a config is composed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from omegaconf import DictConfig, OmegaConf

from verl.config import Config
from verl.config.compose import compose_tree, overridden, typed
from verl.config.run import completed


def tinywiki_config(overrides: Iterable[str]) -> Config:
    """What `load_config("tinywiki", overrides)` gives, in a fifth of the time: the tree is composed once."""
    return completed(typed(Config, overridden(Config, _tree(), overrides), "config 'tinywiki'"))


@cache
def _tree() -> DictConfig:
    tree = compose_tree(Config, "tinywiki", ())
    OmegaConf.set_struct(tree, False)  # open mappings get new keys
    return tree
