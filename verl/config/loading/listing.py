"""All settings as text for a terminal: what `--help` prints."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from verl.config.sections.keys import Key, leaves, type_name


def key_list(schema: type) -> str:
    """All keys with default and meaning, for a terminal of 100 columns."""
    indent = " " * 6
    lines = []
    for key in leaves(schema).values():
        lines.append(f"  {key.path} = {default_text(key)}")
        lines += textwrap.wrap(
            f"{key.meaning} ({type_text(key)})",
            100,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def default_text(key: Key) -> str:
    """The default as YAML writes it, an interpolation unresolved."""
    return key.shown if key.shown else _yaml(key.default)


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return json.dumps(value)


def type_text(key: Key) -> str:
    """The type and range, as in `int or null; >= 1`."""
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = ", ".join(f"{words[name]} {bound:g}" for name, bound in key.bounds.items())
    return f"{type_name(key.type)}; {limits}" if limits else type_name(key.type)
