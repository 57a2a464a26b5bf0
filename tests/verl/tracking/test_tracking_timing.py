from __future__ import annotations

import time

import pytest

from verl.tracking.timing import Timer


def test_phases_add_up_and_nest() -> None:
    timer = Timer()
    with timer("step"):
        for _ in range(2):
            with timer("gen"):
                time.sleep(0.02)
        with timer("adv"):
            pass
    assert timer.seconds["gen"] >= 0.04
    assert timer.seconds["step"] >= timer.seconds["gen"] + timer.seconds["adv"]
    assert timer.metrics()["timing_s/gen"] == timer.seconds["gen"]


def test_a_phase_that_raises_is_counted() -> None:
    timer = Timer()
    with pytest.raises(RuntimeError), timer("gen"):
        time.sleep(0.01)
        raise RuntimeError
    assert timer.seconds["gen"] >= 0.01
