"""How a setting is declared: a typed dataclass field with its meaning, its unit and its allowed range."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    path: bool = False,
    shown: str | None = None,
) -> Any:
    """Declare one setting.

    `meaning` is printed by `--help` and in docs/configuration.md, and names the unit. `ge`, `gt`, `le`, `lt` bound a
    number (for a list: each element); None is never out of range. `path` marks a file name whose leading `~` is
    expanded. `shown` replaces the default in the documentation (for an interpolation in the YAML tree).
    """
    metadata = {
        "help": meaning,
        "bounds": {name: b for name, b in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if b is not None},
        "path": path,
        "shown": shown,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(default: int | None, meaning: str, **more: Any) -> Any:
    """Declare a setting that is at least 1."""
    return setting(default, meaning, ge=1, **more)


def share(default: float | None, meaning: str, **more: Any) -> Any:
    """Declare a setting from 0 to 1."""
    return setting(default, meaning, ge=0, le=1, **more)


def section(cls: type, **changes: Any) -> Any:
    """Declare a nested section: `cls` with its own defaults, except for `changes`."""
    return dataclasses.field(default_factory=lambda: cls(**changes))
