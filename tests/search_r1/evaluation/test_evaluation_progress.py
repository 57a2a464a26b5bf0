"""How far an evaluation is: lines of a log file, also while nothing is finished."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from search_r1.evaluation import progress
from search_r1.evaluation.progress import Progress, _duration


def test_a_line_at_each_tenth(caplog: pytest.LogCaptureFixture) -> None:
    """100 jobs of which 35 were done before: from 36 on, the next tenths are 40, 50, .. 100."""
    with caplog.at_level(logging.INFO), Progress("answers", 100, done=35) as bar:
        for _ in range(65):
            bar.update()
    counts = [int(re.search(r"answers: (\d+) of 100", text)[1]) for text in caplog.messages]
    assert counts == [40, 50, 60, 70, 80, 90, 100]
    assert "left" in caplog.messages[0] and "left" not in caplog.messages[-1]


def test_a_line_after_a_silence(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.01)
    told = threading.Event()
    monkeypatch.setattr(progress, "tell", lambda text: (logging.info(text), told.set()))
    with caplog.at_level(logging.INFO), Progress("answers", 1000) as bar:
        assert told.wait(60)
        bar.update()
    assert caplog.messages[0].startswith("answers: 0 of 1000 after ")


def test_of_nothing_to_do_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Progress("answers", 0):
        pass
    assert not caplog.messages


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (3599.9, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
