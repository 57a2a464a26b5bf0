"""A context variable that has another value inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Context in which `variable` has `value`; it gets its former value back at the end."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
