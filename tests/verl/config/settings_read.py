"""Which settings the code reads, found in its syntax: attributes of what is annotated or assigned as a section."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from verl.config import Config

REPOSITORY = Path(__file__).resolve().parents[3]
# What composes, checks, lists and describes settings, but runs nothing with them.
NOT_THE_RUN = frozenset(
    (
        "validate",
        "objective",
        "config_warnings",
        "without_effect",
        "guard_limits",
        "inert",
        "supported",
        "docs",
        "units",
    )
    + ("foreign", "listing", "keys", "convert", "compose", "command_line", "stored", "fields", "schema")
)


@cache
def types_in(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def sections(cls: type = Config) -> Iterator[tuple[str, type]]:
    """Each section's name and class, however deep."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(types_in(cls)[field.name]):
            yield field.name, types_in(cls)[field.name]
            yield from sections(types_in(cls)[field.name])


NAMED: dict[str, set[type]] = defaultdict(set)
for _name, _cls in sections():
    NAMED[_name].add(_cls)
BASES = {base for found in NAMED.values() for cls in found for base in cls.__mro__} - {object}
CLASSES = {cls.__name__: cls for cls in (Config, *BASES)}


def settings_read() -> set[tuple[type, str]]:
    """(class of a section, name of its field) of every attribute that the run reads."""
    files = [
        file
        for package in ("verl", "search_r1/llm_agent")  # where the config of a run is read
        for file in (REPOSITORY / package).rglob("*.py")
        if not (file.parent.name == "config" and file.stem in NOT_THE_RUN)
    ]
    return {pair for file in files for pair in _File(ast.parse(file.read_text(encoding="utf-8"))).reads()}


class _File:
    """The sections that the names of a file stand for; a name stands for one thing in a file, as far as this goes."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.known: dict[str, set[type]] = defaultdict(set)
        for node in self.nodes:
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                named = {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)}
                self.known[name.removeprefix("self.")] |= {CLASSES[one] for one in named & CLASSES.keys()}
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:  # its methods read its own fields
                self.known["self"].add(CLASSES[node.name])
        for _ in range(3):  # assignments may lead from one to the next
            for node in self.nodes:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
        elif isinstance(target, ast.Name | ast.Attribute):
            self.known[ast.unparse(target).removeprefix("self.")] |= self.classes(value)

    def classes(self, node: ast.expr) -> set[type]:
        """The sections that an expression may be."""
        if isinstance(node, ast.Name):
            return self.known[node.id]
        if not isinstance(node, ast.Attribute):
            return set()
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.known[node.attr]
        owners = self.classes(node.value)
        found = {hint for owner in owners if dataclasses.is_dataclass(hint := types_in(owner).get(node.attr))}
        return found if owners else NAMED.get(node.attr, set())  # type: ignore[return-value]

    def reads(self) -> Iterator[tuple[type, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Attribute):
                yield from ((owner, node.attr) for owner in self.classes(node.value))
