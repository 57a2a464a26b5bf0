"""Finding a class by the dotted name that the config gives: how the search agent plugs into the engine."""

from __future__ import annotations

import importlib
from typing import Any

from verl.errors import ConfigError


def load_by_name(dotted_name: str, key: str) -> Any:
    """The object `package.module.Name`. Raises `ConfigError` naming the config `key` when there is none."""
    module_name, _, name = dotted_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={dotted_name}: {error}; give the dotted name of a class that can be imported"
        ) from error
