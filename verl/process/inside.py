"""A context variable that has another value inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The value that `variable` had before comes back at the end of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
