"""Seconds with nothing to do, on a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from verl.trainer import idle_clock
from verl.trainer.idle_clock import IdleClock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_clock(now: float) -> None:
        monkeypatch.setattr(idle_clock.time, "monotonic", lambda: now)

    set_clock(0.0)
    return set_clock


def test_only_time_between_start_and_stop_counts(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    at(1.0)
    clock.start()
    at(3.0)
    clock.start()  # twice: since the first
    at(4.0)
    clock.stop()
    clock.stop()
    at(9.0)
    assert clock.read() == 3.0 and clock.read() == 0.0


def test_what_is_done_inside_a_wait_does_not_count(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    clock.start()
    at(2.0)
    with clock.stopped():
        at(7.0)
        with clock.stopped():
            at(8.0)
    at(9.5)
    assert clock.read() == 3.5  # 2 before, 1.5 after
    at(10.0)
    assert clock.read() == 0.5, "it goes on"


def test_nothing_that_is_done_starts_a_clock_that_does_not_run(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    with clock.stopped():
        at(5.0)
    at(6.0)
    assert clock.read() == 0.0
