"""Batched work in which one bad item does not fail the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from search_r1.errors import SearchError, SearchFailed

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Item = TypeVar("Item")


def attempt(work: Callable[[], T], who: str) -> T | SearchError:
    """The result or the error of `work`; exceptions are caught, so that they do not end the thread."""
    try:
        return work()
    except SearchError as error:
        return error
    except Exception as error:
        _LOG.exception("%s failed", who)
        return SearchFailed(f"{who} failed: {type(error).__name__}: {error}")


def attempt_each(work: Callable[[list[Item]], Sequence[T]], items: list[Item], who: str) -> list[T | SearchError]:
    """The result or the error of each item. A failing batch is halved until the failing items are isolated."""
    found = attempt(partial(_complete, work, items, who), who)
    if isinstance(found, list):
        return found
    if len(items) == 1:
        return [found]
    half = len(items) // 2
    return attempt_each(work, items[:half], who) + attempt_each(work, items[half:], who)


def _complete(work: Callable[[list[Item]], Sequence[T]], items: list[Item], who: str) -> list[T | SearchError]:
    found = work(items)
    if len(found) != len(items):
        raise SearchFailed(f"{who} returned {len(found)} results for {len(items)} items")
    return list(found)
