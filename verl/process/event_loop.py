"""Waiting for a coroutine from code that is not one, and for tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result, in a thread where an event loop is running already (a notebook, a
    server).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel the tasks, and wait until none is running."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def hear(task: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for, so that asyncio does not report it."""
    if task.done() and not task.cancelled():
        task.exception()
