"""Which rule gave a reward: the config's reward, and what each component measures, from their docstrings.

The sources are parsed, not imported: viewing a run must not start what a reward uses (a judge, a model).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import search_r1.rewards
from search_r1.viewer.run_settings import RunSettings

_ROOM = "search_r1.rewards"


def reward_rule(settings: RunSettings, is_training: bool) -> dict[str, Any]:
    """`function`, `arguments`, and `text`, the function's docstring ("" if it is not shipped with this project)."""
    function = str(settings.setting("reward.function", ""))
    arguments = settings.setting("reward.kwargs", {})
    if not is_training:
        arguments = settings.setting("reward.val_kwargs", arguments)
    module, _, name = function.rpartition(".")
    text = _classes(module).get(name, "") if module.startswith(_ROOM) else ""
    return {"function": function, "arguments": arguments, "text": text}


def components_of(row: dict[str, Any], rule: dict[str, Any]) -> list[dict[str, Any]]:
    """`name`, `value`, `weight` (None if the reward is not a weighted sum) and `text` of each component of a row."""
    arguments = rule["arguments"] if isinstance(rule["arguments"], dict) else {}
    weights = arguments.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    texts = _component_texts()
    return [
        {"name": name, "value": value, "weight": weights.get(name), "text": texts.get(name, "")}
        for name, value in (row["reward_components"] or {}).items()
    ]


@lru_cache(maxsize=64)
def _classes(module: str) -> dict[str, str]:
    """Docstrings by class or function of a shipped module."""
    path = _folder().joinpath(*module.removeprefix(_ROOM).split(".")).with_suffix(".py")
    return {node.name: ast.get_docstring(node) or "" for node in _definitions(path)} if path.is_file() else {}


@lru_cache(maxsize=1)
def _component_texts() -> dict[str, str]:
    """Docstrings by the name that `@component("name")` registers."""
    return {
        name: ast.get_docstring(node) or ""
        for path in sorted(_folder().glob("*.py"))
        for node in _definitions(path)
        if (name := _registered_name(node)) is not None
    }


def _folder() -> Path:
    return Path(search_r1.rewards.__path__[0])


def _definitions(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node


def _registered_name(node: ast.ClassDef | ast.FunctionDef) -> str | None:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "component" and mark.args:
            given = mark.args[0]
            return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None
    return None
