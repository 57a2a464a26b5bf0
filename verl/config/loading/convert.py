"""From plain containers (as YAML gives them) to typed dataclasses, with errors that name the key."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from verl.config.loading.foreign import unknown_key
from verl.config.sections.fields import join, type_name
from verl.errors import ConfigError

T = TypeVar("T")

_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


class _Mismatch(Exception):
    """The value is not of the wanted type."""


def build(cls: type[T], values: Any) -> T:
    """Make a `cls` from nested mappings. Raises ConfigError for an unknown key, a wrong type, or out of range."""
    return _section(cls, values, "", cls)


def _section(cls: type[T], values: Any, path: str, root: type) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a section with keys of its own, got {values!r}")
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise ConfigError(unknown_key(root, join(path, str(name))))
    hints = get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in values]  # type: ignore[arg-type]
    return cls(**{f.name: _field(f, hints[f.name], values[f.name], join(path, f.name), root) for f in fields})


def _field(field: dataclasses.Field, annotation: Any, value: Any, path: str, root: type) -> Any:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _section(annotation, value, path, root)
    try:
        converted = _typed(value, annotation)
    except _Mismatch:
        raise ConfigError(f"{path}: expected {type_name(annotation)}, got {value!r}") from None
    _check_bounds(converted, field.metadata.get("bounds", {}), path)
    return _expand(converted) if field.metadata.get("path") else converted


def _typed(value: Any, annotation: Any) -> Any:
    """`value` as the type `annotation`. Raises _Mismatch."""
    if annotation is Any:
        return value
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _first_match(value, args)
    if origin is Literal:
        return _require(value, isinstance(value, str) and value in args)
    if origin is list:
        return [_typed(v, args[0]) for v in _require(value, isinstance(value, (list, tuple)))]
    if origin is tuple:
        _require(value, isinstance(value, (list, tuple)) and len(value) == len(args))
        return tuple(_typed(v, a) for v, a in zip(value, args, strict=True))
    if origin is dict:
        return dict(_require(value, isinstance(value, Mapping)))
    return _scalar(value, annotation)


def _first_match(value: Any, annotations: tuple[Any, ...]) -> Any:
    if value is None and type(None) in annotations:
        return None
    for annotation in annotations:
        try:
            return _typed(value, annotation)
        except _Mismatch:
            continue
    raise _Mismatch


def _scalar(value: Any, wanted: type) -> Any:
    if isinstance(value, str) and wanted in (int, float, bool):
        value = _read(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is float:
        return float(_require(value, number and math.isfinite(value)))
    if wanted is int:
        return _require(value, number and isinstance(value, int))
    if wanted is str and number:  # experiment_name=7 is a name
        return str(value)
    return _require(value, isinstance(value, wanted))


def _read(text: str) -> Any:
    """The number or truth value that a text is, as an environment variable has it (`${oc.env:SLURM_NNODES}`); Hydra
    takes it, too. Other texts stay.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _require(value: Any, holds: bool) -> Any:
    if not holds:
        raise _Mismatch
    return value


def _check_bounds(value: Any, bounds: Mapping[str, float], path: str) -> None:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    for name, bound in bounds.items():
        holds, words = _BOUNDS[name]
        if any(n is not None and not holds(n, bound) for n in numbers):
            raise ConfigError(f"{path}: must be {words} {bound:g}, got {value!r}")


def _expand(value: Any) -> Any:
    """A file name, or a list of them, with a leading `~` replaced by the home folder."""
    if isinstance(value, list):
        return [os.path.expanduser(v) for v in value]
    return os.path.expanduser(value) if isinstance(value, str) else value
