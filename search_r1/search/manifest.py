"""A record next to an index of what it was built from, so that it is never used with another corpus or encoder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from search_r1.errors import IndexMismatchError


def manifest_path(index_path: Path) -> Path:
    """The path of the manifest of an index or embeddings file."""
    return index_path.with_name(index_path.name + ".json")


def write_manifest(path: Path, fields: dict[str, Any]) -> None:
    """Save `fields` as JSON, atomically."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    staging.replace(path)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The saved fields, or None if there is no manifest. Raises `IndexMismatchError` if it is unreadable."""
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise IndexMismatchError(f"{path} is not a JSON manifest: {error}; build the index again") from error
    if not isinstance(fields, dict):
        raise IndexMismatchError(f"{path} is not a JSON object; build the index again")
    return fields


def check_manifest(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `IndexMismatchError` naming every field of `expected` that differs in `found`."""
    differing = [key for key, value in expected.items() if found.get(key) != value]
    if differing:
        wrong = [f"{key}: index has {found.get(key)!r}, now {expected[key]!r}" for key in differing]
        raise IndexMismatchError(
            f"the index of {path} does not match ({'; '.join(wrong)}); use what it was built from or build it again"
        )
