"""The ranks of a program on this machine: what they are told, and how all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from verl.process.ranks import run_ranks

RANK = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"{rank}.pid").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']}", file=sys.stderr, flush=True)
"""
LAUNCHER = """
import sys
from verl.process.interrupts import heed_interrupts
from verl.process.ranks import run_ranks
from program_end import exit_status
heed_interrupts()
sys.exit(exit_status(lambda: run_ranks([sys.executable, *sys.argv[1:]], 2), "nothing was saved"))
"""


def alive(folder: Path) -> list[int]:
    """The ranks whose processes still run."""
    pids = {int(path.stem): int(path.read_text()) for path in folder.glob("*.pid")}
    return [rank for rank, pid in pids.items() if Path(f"/proc/{pid}").is_dir()]


def run(code: str, folder: Path) -> int:
    return run_ranks([sys.executable, "-c", RANK + code, str(folder)], 2)


def test_every_rank_knows_its_place_and_only_the_first_is_heard(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert (
        run("(folder / f'{rank}').write_text(os.environ['LOCAL_RANK'] + os.environ['VERL_RENDEZVOUS'])", tmp_path) == 0
    )
    places = [(tmp_path / name).read_text() for name in "01"]
    assert places[0][0] == "0" and places[1][0] == "1" and places[0][1:] == places[1][1:] != ""
    assert capfd.readouterr().err == "rank 0 of 2\n"
    assert not list(temporary.iterdir()), "no folder stays"


def test_the_ranks_share_the_cores_of_their_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the machine: threads beyond the quota wait for each other. A setting of the user's stays."""
    monkeypatch.setattr("verl.process.startup.usable_cores", lambda: 6)
    threads = "(folder / f'{rank}').write_text(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run(threads, tmp_path) == 0 and [(tmp_path / name).read_text() for name in "01"] == ["3", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run(threads, tmp_path) == 0 and [(tmp_path / name).read_text() for name in "01"] == ["5", "5"]


def test_all_end_when_one_fails_and_its_error_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("if rank == 1: sys.exit('error: of the second')\ntime.sleep(600)", tmp_path) == 1
    assert capfd.readouterr().err.splitlines() == ["rank 0 of 2", "rank 1 of 2", "error: of the second"]
    assert alive(tmp_path) == []


def test_an_error_that_every_rank_finds_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "time.sleep(1 - rank)\nprint('error: no such file', file=sys.stderr)\nsys.exit(2)"
    assert run(code, tmp_path) == 2
    assert capfd.readouterr().err.count("no such file") == 1


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", tmp_path) == 1
    assert "error: worker 1 was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """As of a terminal, which sends it to the whole process group."""
    (temporary := tmp_path / "tmp").mkdir()
    code = (
        "from verl.process.interrupts import heed_interrupts; from program_end import exit_status\n"
        "heed_interrupts()\n(folder / f'{rank}.ready').touch()\nsys.exit(exit_status(lambda: time.sleep(600), ''))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "-c", RANK + code, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(launcher.pid, number)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert said.splitlines() == ["rank 0 of 2", "interrupted: nothing was saved"]
    assert alive(tmp_path) == [] and not list(temporary.iterdir())
