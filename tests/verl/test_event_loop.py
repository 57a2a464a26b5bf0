"""A coroutine is run to its end from plain code, also where a loop is running."""

from __future__ import annotations

import asyncio

import pytest

from verl.event_loop import run_to_end


async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError("negative")
    return 2 * number


def test_without_a_running_loop():
    assert run_to_end(double(4)) == 8
    with pytest.raises(ValueError, match="negative"):
        run_to_end(double(-1))


def test_inside_a_running_loop():
    async def cell() -> int:
        with pytest.raises(ValueError, match="negative"):
            run_to_end(double(-1))
        return run_to_end(double(5))

    assert asyncio.run(cell()) == 10
