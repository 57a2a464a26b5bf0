"""Phases, spans and their sums against numbers worked out by hand, and the file that a trace viewer opens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from verl.tracking.spans import OverlapRecorder, Span, SpanRecorder, Timer, covered_s, gaps, now, write_timeline


def test_spans_are_on_the_clock_of_the_day() -> None:
    recorder = SpanRecorder()
    with recorder("update"), recorder("forward"):
        pass
    inner, outer = recorder.take()
    assert (inner.name, outer.name) == ("forward", "update")
    assert outer.start <= inner.start <= inner.end <= outer.end <= now()
    assert outer.start == pytest.approx(time.time(), abs=60)
    assert recorder.take() == []


def test_what_fails_has_an_end() -> None:
    recorder = SpanRecorder()
    with pytest.raises(RuntimeError), recorder("update"):
        raise RuntimeError
    assert [span.name for span in recorder.take()] == ["update"]


def test_overlapping_tasks_are_one_span_from_first_in_to_last_out() -> None:
    recorder = OverlapRecorder("generate")
    first, second = recorder(), recorder()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    [so_far] = recorder.take()
    second.__exit__(None, None, None)
    [rest] = recorder.take()
    assert rest.start == so_far.end, "what goes on is told in two parts that meet"
    with recorder():
        pass
    [later] = recorder.take()
    assert later.start >= rest.end


def test_covered_time_counts_overlaps_once_and_only_within_the_windows() -> None:
    spans = [Span("a", 0, 4), Span("b", 3, 5), Span("c", 3.5, 4.5), Span("d", 8, 20), Span("e", 30, 40)]
    assert covered_s(spans, [Span("step", 1, 10)]) == (5 - 1) + (10 - 8)
    assert covered_s(spans, [Span("step", 1, 10), Span("step", 15, 35)]) == 6 + (20 - 15) + (35 - 30)
    assert covered_s([], [Span("step", 1, 10)]) == 0


def test_gaps_are_what_is_left_of_a_window() -> None:
    spans = [Span("a", 0, 2), Span("b", 3, 5), Span("c", 4, 6), Span("d", 12, 13)]
    assert gaps(spans, Span("w", 1, 10), "wait") == [Span("wait", 2, 3), Span("wait", 6, 10)]
    assert gaps(spans, Span("w", 3, 5), "wait") == []
    assert gaps([], Span("w", 3, 5), "wait") == [Span("wait", 3, 5)]


def test_a_timeline_is_a_file_in_the_trace_event_format(tmp_path: Path) -> None:
    rows = {
        "driver": [Span("gen", 100.5, 101.0), Span("step", 100.5, 103.0)],
        "engine 0": [Span("generate", 100.75, 101)],
    }
    path = write_timeline(tmp_path, 3, rows)
    assert path == tmp_path / "timeline" / "step_3.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("driver", "step", 0.0, 2.5e6),  # what is around comes first
        ("driver", "gen", 0.0, 0.5e6),
        ("engine 0", "generate", 0.25e6, 0.25e6),
    ]


def test_a_step_without_spans_has_a_file_too(tmp_path: Path) -> None:
    assert json.loads(write_timeline(tmp_path, 1, {"driver": []}).read_text())["traceEvents"]


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
