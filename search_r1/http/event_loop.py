"""Objects that belong to one event loop at a time."""

from __future__ import annotations

import asyncio


def entered_loop(current: asyncio.AbstractEventLoop | None, owner: str) -> asyncio.AbstractEventLoop | None:
    """The running event loop, or None if it is `current`, the loop that the object belongs to.

    On a new loop, connections must be opened again. Raises `RuntimeError` if `current` is another open loop.
    """
    loop = asyncio.get_running_loop()
    if current is loop:
        return None
    if current is not None and not current.is_closed():
        raise RuntimeError(f"this {owner} belongs to another event loop; close() it there first")
    return loop
