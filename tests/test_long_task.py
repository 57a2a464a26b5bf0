"""How far a long task is: lines of a file, also while nothing is finished, and a bar on a real terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from e2e_world import ROOT
from rich.console import Console
from terminal import TerminalRun

import long_task
from long_task import BYTES, Progress, duration, reading, size, track


@pytest.fixture
def every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_task, "SHORT_S", 0.0)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub(r"^\[ *\d+ s\] ", "", line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.usefixtures("every_tenth")
def test_a_line_at_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    """100 jobs of which 35 were done before: from 36 on, the next tenths are 40, 50, .. 100."""
    with Progress("answers", 100, done=35) as bar:
        for _ in range(65):
            bar.update()
    told = lines(capsys)
    assert [int(re.search(r"answers: (\d+) of 100", text)[1]) for text in told] == [40, 50, 60, 70, 80, 90, 100]
    assert "left" in told[0] and "left" not in told[-1]


def test_a_line_after_a_silence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_task, "QUIET_S", 0.01)
    told = threading.Event()
    tell = Progress._tell
    monkeypatch.setattr(Progress, "_tell", lambda self: (tell(self), told.set()))
    with Progress("answers", 1000):
        assert told.wait(60)
    assert lines(capsys)[0].startswith("answers: 0 of 1000, nothing yet after ")


@pytest.mark.usefixtures("every_tenth")
def test_of_nothing_to_do_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("answers", 0):
        pass
    assert not lines(capsys)


def test_a_short_task_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(100), "numbers", 100)) == list(range(100))
    assert not lines(capsys)


def test_what_is_not_shown_tells_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_task, "SHORT_S", 0.0)
    for progress in (Progress("one of two ranks", 4, shown=False), Progress("steps", 4, lines=False)):
        with progress:
            progress.update(4)
    assert not lines(capsys)


@pytest.mark.usefixtures("every_tenth")
def test_a_file_is_counted_as_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = os.urandom(5_000_000)
    (tmp_path / "corpus").write_bytes(content)
    with reading(tmp_path / "corpus") as file:
        assert file.read() == content
    told = lines(capsys)
    assert told[-1].startswith("read corpus: 5.0 MB of 5.0 MB, ") and told[-1].endswith(" a second")


def test_the_time_left_is_that_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 of 5000 were there; another 1000 took 100 s, so the last 3000 take 300."""
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress("encode", 5000, done=1000, unit="passages", lines=False) as progress:
        clock[0] += 100
        progress.update(1000)
        assert progress.counts() == "2000 of 5000 passages"
        assert progress.pace() == "10 a second, 5 min 0 s left"
        progress.begin(1950, seconds=1000)
        assert progress.pace() == "20 s each, 16 h 40 min left"


def test_the_time_left_counts_down_within_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four steps in 200 s. 60 s into the third 140 s are left; when it takes more than 200 s that shows."""
    clock = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress("train", 4, unit="steps", lines=False) as progress:
        for _ in range(2):
            clock[0] += 100
            progress.update()
        clock[0] += 60
        assert progress.pace() == "100 s each, 2 min 20 s left"
        clock[0] += 240
        assert progress.pace() == "250 s each, 8 min 20 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (3599.9, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 bytes"), (1000, "1.0 kB"), (14.3e9, "14.3 GB"), (2e15, "2000.0 TB")]
)
def test_sizes_are_for_people(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


TWO_TASKS = """
import logging, sys, time
from long_task import BYTES, Progress
logging.basicConfig(level=logging.INFO, format="logged %(message)s")
with Progress("encode", 40, unit="passages") as outer:
    for number in range(40):
        with Progress("[red]shard[/red]", 10**6, unit=BYTES) as inner:
            inner.update(10**6, note="all of it")
            time.sleep(1.5 if number == 20 else 0.02)  # long enough to be seen
        outer.update()
        if number == 20:
            print("printed to standard output")
            print("printed to standard error", file=sys.stderr)
"""


def on_a_terminal(code: str, folder: Path, columns: int = 100) -> str:
    """What a terminal is sent by a program."""
    run = TerminalRun(["-c", code], folder / "seen", columns)
    assert run.end() == 0, run.log.read_text()
    return run.log.read_text()


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_has_bars_and_what_is_printed_stands_above_them(columns: int, tmp_path: Path) -> None:
    seen = on_a_terminal(TWO_TASKS, tmp_path, columns)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert re.search(r"encode\s+\S+\s+\d+ of 40 passages, [\d.]+ a second, \d+ s left", plain)
    assert "[red]shard[/red]" in plain and "1.0 MB of 1.0 MB" in plain and "all of it" in plain
    for text in ("printed to standard output", "printed to standard error"):
        assert re.search(rf"(^|[\r\n]){text}\s*[\r\n]", plain), text
    assert "\x1b[?25h" in seen.rpartition("\x1b[?25l")[2], "the cursor is shown again"


def test_standard_output_that_is_a_file_stays_there(tmp_path: Path) -> None:
    redirected = f"import os; os.dup2(os.open({str(tmp_path / 'out')!r}, os.O_WRONLY | os.O_CREAT), 1)"
    seen = on_a_terminal(redirected + TWO_TASKS, tmp_path)
    assert (tmp_path / "out").read_text() == "printed to standard output\n"
    assert "printed to standard output" not in seen and "40 of 40 passages" in seen


def test_in_a_file_there_is_no_escape() -> None:
    code = TWO_TASKS.replace("logging.basic", "import long_task; long_task.SHORT_S = 0; logging.basic")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "\x1b" not in done.stderr + done.stdout and "\r" not in done.stderr
    assert re.search(r"^\[ *\d+ s\] encode: 20 of 40 passages, [\d.]+ a second, \d+ s left$", done.stderr, re.M)


def test_a_console_of_its_own() -> None:
    file = io.StringIO()
    with Progress("experiment", 2, unit="steps", console=Console(file=file, force_terminal=True, width=100)) as bar:
        assert bar.has_bar
        bar.update(2)
    assert "2 of 2 steps" in file.getvalue()


def test_a_size_that_is_not_known() -> None:
    with Progress("fetch", None, unit=BYTES, lines=False) as progress:
        progress.update(1500)
        assert progress.counts() == "1.5 kB" and progress.seconds_left() is None


def test_it_imports_nothing_of_the_project_and_rich_only_for_a_terminal() -> None:
    """verl and the retrieval server use it, and neither may import the other."""
    code = (
        "import sys, long_task; list(long_task.track(range(9), 'numbers', 9)); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'rich', 'search_r1', 'torch', 'verl'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "\n"
