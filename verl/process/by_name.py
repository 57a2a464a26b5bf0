"""Loads user code by the dotted name in the config: how the search agent plugs into the engine."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import verl
from verl.errors import ConfigError

_NOT_THEIRS = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<", str(verl.__path__[0]))


def load_by_name(dotted_name: str, key: str) -> Any:
    """The object `package.module.Name`. Raises `ConfigError` naming the config `key` when there is none."""
    module_name, _, name = dotted_name.rpartition(".")
    # Look in the current folder too, as `python -m` does: a script's own folder, or a worker's, may be another.
    folder = os.getcwd()
    if "" not in sys.path and folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={dotted_name}: {error}; give module.Name of what can be imported: a module in the current folder "
            f"({os.getcwd()}), on PYTHONPATH ({os.environ.get('PYTHONPATH') or 'which is not set'}), or installed"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}={dotted_name}: importing {module_name} raised {in_words(error)}") from error


def dotted_name(thing: Any) -> str:
    """The dotted name of a class or function, or of the class of an object."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def in_words(error: BaseException) -> str:
    """An error that code of others raised, with the last line of theirs: `KeyError: 'x' (my_rewards.py:12)`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
