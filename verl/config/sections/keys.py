"""The keys of a schema: its leaves as dotted paths, and the valid key nearest to a wrong one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Key:
    """One setting: its dotted path, type, default, meaning, and bounds (`ge`, `gt`, `le`, `lt`)."""

    path: str
    type: Any
    default: Any
    meaning: str
    bounds: dict[str, float]
    shown: str | None

    @property
    def free_form(self) -> bool:
        """Whether any key may follow below this one (a mapping handed to someone else's code)."""
        return get_origin(self.type) is dict


def join(prefix: str, name: str) -> str:
    """Dotted path of `name` below `prefix` (empty at the root)."""
    return f"{prefix}.{name}" if prefix else name


def walk(cls: type, prefix: str = "", defaults: Any = None) -> Iterator[Key]:
    """All leaves of the schema, in the order of declaration. Every field has a default, so `cls()` has them all."""
    defaults = cls() if defaults is None else defaults
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, annotation, default = join(prefix, field.name), hints[field.name], getattr(defaults, field.name)
        if dataclasses.is_dataclass(annotation):
            yield from walk(annotation, path, default)  # type: ignore[arg-type]
            continue
        meta = field.metadata
        yield Key(path, annotation, default, meta.get("help", ""), meta.get("bounds", {}), meta.get("shown"))


def value_at(root: Any, path: str) -> Any:
    """Value of the attribute at the dotted `path`; below a mapping, its item."""
    for name in path.split("."):
        root = root[name] if isinstance(root, dict) else getattr(root, name)
    return root


@lru_cache
def leaves(cls: type) -> dict[str, Key]:
    """All settings of a schema by dotted path."""
    return {key.path: key for key in walk(cls)}


@lru_cache
def sections(cls: type) -> frozenset[str]:
    """Dotted paths of all sections of a schema."""
    paths = (path.split(".") for path in leaves(cls))
    return frozenset(".".join(parts[:n]) for parts in paths for n in range(1, len(parts)))


def is_known(cls: type, path: str) -> bool:
    """Whether `path` is a setting, a section, or lies below a free-form mapping."""
    if path in leaves(cls) or path in sections(cls):
        return True
    parts = path.split(".")
    above = (".".join(parts[:n]) for n in range(1, len(parts)))
    return any(p in leaves(cls) and leaves(cls)[p].free_form for p in above)


def nearest(cls: type, path: str) -> str | None:
    """The setting that `path` most likely meant: it is its end, or its name is spelt like it in a like place."""
    known = list(leaves(cls))
    ends = [k for k in known if k.endswith(f".{path}")]
    if ends:
        return ends[0]
    # The names themselves have to be alike: between two keys of one long section half of the letters are the section's.
    close = [k for k in known if _alike(_name(path), _name(k)) >= 0.75]
    if "." in path:
        close = [k for k in close if _likeness(path, k) >= 0.6]
    return max(close, key=lambda k: (_alike(_name(path), _name(k)), _likeness(path, k)), default=None)


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _alike(given: str, known: str) -> float:
    """The likeness of two names; high if one only leaves words of the other out: `total_steps`."""
    words, others = set(given.split("_")), set(known.split("_"))
    return max(_likeness(given, known), 0.9 if len(words) > 1 and words <= others else 0.0)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def alternatives(annotation: Any) -> set[Any]:
    """The types of a union; a type that is none by itself."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def type_name(annotation: Any) -> str:
    """A type in words, for users: `int or null`, `one of fsdp, megatron`, `list of str`."""
    args = get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any value"
    origin = get_origin(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    match getattr(origin, "__name__", str(origin)):
        case "Literal":
            return "one of " + ", ".join(str(a) for a in args)
        case "list":
            return f"list of {type_name(args[0])}"
        case "tuple":
            return f"list of {len(args)} {type_name(args[0])}"
        case "dict":
            return "mapping"
        case _:
            return " or ".join(type_name(a) for a in args)
