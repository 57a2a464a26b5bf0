"""Objects that belong to one event loop at a time."""

from __future__ import annotations

import asyncio


def entered_loop(current: asyncio.AbstractEventLoop | None, owner: str) -> asyncio.AbstractEventLoop | None:
    """The running event loop, or None when it is `current`, to which the object belongs.

    A closed loop took its connections with it; while `current` is open, raises `RuntimeError`.
    """
    loop = asyncio.get_running_loop()
    if current is loop:
        return None
    if current is not None and not current.is_closed():
        raise RuntimeError(f"this {owner} belongs to another event loop; close() it there first")
    return loop
