"""scripts/bench/soak.py: the growth by hand, and real process trees of which one thing grows, or nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "bench"
sys.path.insert(0, str(FOLDER))  # as Python does when it runs a file there

import soak  # noqa: E402
from growth import Series, Windows, growth_of  # noqa: E402
from process_watch import RAY, ProcessWatch, ray_objects, role  # noqa: E402

WARM = """
import json, os, pathlib, sys, time
run_dir, what, held = pathlib.Path(sys.argv[1]), sys.argv[2], []

def steps():  # each goes on once it was read, of which the row about the whole run is the last
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            file.write(json.dumps({"step": step}) + chr(10))
            file.flush()
            while f"{chr(10)}{step},whole run,processes," not in (run_dir / "soak.csv").read_text():
                time.sleep(0.01)
            yield step
"""
# The run starts this as its child, which shows that descendants are watched.
CHILD = (
    WARM
    + """
import subprocess
used = b'x' * 2**26  # beside which what the interpreter takes for itself is little
for step in steps():
    if what == "memory":
        held.append(b'x' * 2**20)
    elif what == "handles":
        held.append(os.open(__file__, os.O_RDONLY))
    elif what == "processes" and step == 15:
        held.append(subprocess.Popen(["sleep", "600"]))
for process in held if what == "processes" else []:
    process.kill()
"""
)
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What `main` is given, with tmp_path as the folder of the run; more may be added."""
    before = signal.getsignal(signal.SIGTERM)
    given = ["soak.py", "--run_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(soak, "POLL_S", 0.01)
    yield given
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("nothing", []),
        ("memory", [("program", "rss MiB")]),
        ("handles", [("program", "handles")]),
        ("processes", [("whole", "processes")]),
    ],
)
def test_what_grows_is_named(
    what: str,
    found: list[tuple[str, str]],
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each growth is told with its role and quantity."""
    script = tmp_path / "program.py"
    script.write_text(CHILD)
    arguments += ["--after", "8", "--window", "6", "--", sys.executable, "-c", PARENT, str(script), str(tmp_path), what]
    status = soak.main()
    printed = capsys.readouterr().out
    grew = re.findall(r"^GREW: (\S+) [^,]+, ([^:]+):", printed, re.MULTILINE)
    assert ("flat: no memory grew" in printed) == (not grew)
    assert status == bool(found)
    # A process that came later has all of its quantities beside it.
    assert [row for row in grew if row[0] != "sleep"] == found
    assert (("sleep", "rss MiB") in grew) == (what == "processes")


def test_objects_that_ray_keeps(ray_session: Any) -> None:
    watched = ProcessWatch(os.getpid())  # finds the session's raylet among our children
    kept = [ray_session.put(bytes(37 * 2**20)) for _ in range(2)]
    end, found = time.monotonic() + 120, {}  # a raylet describes itself every 10 seconds
    while not (len(found) == 2 and found["objects MiB"] > 74) and time.monotonic() < end:
        time.sleep(0.2)
        found = {quantity: value for process, quantity, value in watched.read() if process == RAY}
    assert found["objects"] >= len(kept) and 74 < found["objects MiB"] < 80


def test_objects_in_a_description() -> None:
    state = "- num pinned objects: 3\n- pinned objects size: 1572864\n- num local plasma objects: 4\n"
    assert list(ray_objects(state)) == [(RAY, "objects", 4.0), (RAY, "objects MiB", 1.5)]
    assert list(ray_objects(state[:40])) == [], "a file that is being written"


def series(values: list[float], quantity: str = "rss MiB", first: int = 1) -> Series:
    return {("actor 7", quantity): dict(enumerate(values, first))}


def test_growth_is_of_medians() -> None:
    # Steps 2 to 5: 100, 104, 900, 102, median 103. Steps 7 to 10: 110, 1, 106, 112, median 108.
    values = [5.0, 100.0, 104.0, 900.0, 102.0, 7.0, 110.0, 1.0, 106.0, 112.0]
    (growth,) = growth_of(series(values), Windows.of(after=3, width=4, last=10))
    assert (growth.before, growth.after) == (103.0, 108.0)
    assert growth.ratio == pytest.approx(5 / 103)
    assert not growth.grew(0.05) and growth.grew(0.048)


def test_around_step_50_is_41_to_60() -> None:
    assert Windows.of(50, 20, 300) == Windows(range(41, 61), range(281, 301))
    assert Windows.of(50, 20, 80).late == range(61, 81)
    with pytest.raises(ValueError, match="79 steps are too few"):
        Windows.of(50, 20, 79)


def test_what_came_later_grew_and_what_went_did_not() -> None:
    windows = Windows(range(1, 3), range(5, 7))
    (late,) = growth_of(series([4.0, 4.0], first=5), windows)
    (early,) = growth_of(series([4.0, 4.0]), windows)
    assert late.grew(0.05) and not early.grew(0.05)
    assert growth_of(series([4.0, 4.0], first=3), windows) == []
    (zero,) = growth_of(series([0.0] * 6, "objects"), windows)
    assert not zero.grew(0.05)


def test_a_count_grew_when_it_is_always_more_than_it_ever_was() -> None:
    windows = Windows(range(1, 4), range(4, 7))
    # At most 7 in the first window, at least 7, then 8, in the last.
    (same,) = growth_of(series([5.0, 7.0, 5.0, 9.0, 7.0, 9.0], "handles"), windows)
    (more,) = growth_of(series([5.0, 7.0, 5.0, 9.0, 8.0, 9.0], "handles"), windows)
    assert (more.before, more.after) == (7.0, 8.0)
    assert not same.grew(0.05) and more.grew(0.5)


def test_what_explains_is_no_growth() -> None:
    windows = Windows(range(1, 2), range(2, 3))
    assert not any(g.grew(0.05) for g in growth_of(series([1.0, 9.0], "own MiB"), windows))
    assert all(g.grew(0.05) for g in growth_of(series([1.0, 9.0], "rss MiB"), windows))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::RolloutWorker.run", "", ""], "RolloutWorker"),
        (["VLLM::EngineCore"], "EngineCore"),
        (["/x/ray/core/src/ray/raylet/raylet", "--gcs-address=1.2.3.4:5"], "raylet"),
        (["/x/python", "-m", "verl.trainer.main_ppo", "a=b.py"], "verl.trainer.main_ppo"),
        (["/x/python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(6)"],
         "multiprocessing.resource_tracker"),
        (["/x/python", "-u", "/x/ray/dashboard/dashboard.py", "--host=h"], "dashboard"),
    ],
)  # fmt: skip
def test_role_of_a_process(command: list[str], name: str) -> None:
    assert role(command) == name


def test_a_run_that_fails_tells_nothing(arguments: list[str]) -> None:
    """As a program of its own, whose exit status says so."""
    command = [sys.executable, str(FOLDER / "soak.py"), *arguments[1:], "--", sys.executable, "-c", "exit(3)"]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 2


def test_a_run_that_is_too_short_tells_nothing(tmp_path: Path, arguments: list[str]) -> None:
    """30 steps say nothing about growth after step 50."""
    arguments += ["--", sys.executable, "-c", WARM + "list(steps())", str(tmp_path), "nothing"]
    assert soak.main() == 2


def test_metrics_of_an_earlier_run_are_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    arguments += ["--", "true"]
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert "another --run_dir" in capsys.readouterr().err
