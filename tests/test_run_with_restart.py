"""The supervisor, with real commands that die in the ways a training run does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from phases import wait_for_end

ROOT = Path(__file__).resolve().parents[1]

# A run: notes its start and its arguments, saves a state on the starts named in SAVES, then ends as ENDS says. Its
# folder is RUN.
RUN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
with (folder / "starts").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
start = len((folder / "starts").read_text().splitlines())
if str(start) in os.environ["SAVES"].split():
    state = folder / os.environ["RUN"] / "state" / f"global_step_{start}"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
ends = os.environ["ENDS"].split()
end = ends[min(start, len(ends)) - 1]
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "wait":
    def stop(number, frame):
        print(f"clean end by {number}", flush=True)
        sys.exit(130)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    (folder / "waits").touch()
    time.sleep(600)
sys.exit(int(end))
"""


def command(folder: Path, *options: str, program: str = RUN) -> list[str]:
    script = ["bash", str(ROOT / "scripts/run_with_restart.sh"), "--backoff_s", "0", *options]
    return [*script, "--", sys.executable, "-c", program, f"trainer.default_local_dir={folder / 'run'}"]


def environment(folder: Path, ends: str, saves: str = "", run: str = "run") -> dict[str, str]:
    return os.environ | {"FOLDER": str(folder), "ENDS": ends, "SAVES": saves, "RUN": run}


def supervise(folder: Path, ends: str, *options: str, saves: str = "", run: str = "run") -> tuple[int, int, list[str]]:
    """(exit status, number of starts, what the supervisor said)."""
    variables = environment(folder, ends, saves, run)
    done = subprocess.run(command(folder, *options), env=variables, capture_output=True, text=True, timeout=120)
    starts = (folder / "starts").read_text().splitlines()
    return done.returncode, len(starts), [line for line in done.stderr.splitlines() if "run_with_restart:" in line]


def test_a_run_that_dies_goes_on_until_it_is_done(tmp_path: Path) -> None:
    status, starts, said = supervise(tmp_path, "1 kill 1 0", saves="1 2 3")
    assert (status, starts, len(said)) == (0, 4, 3)
    run = tmp_path / "run"
    assert f"exit status 1; restart 1 of 10 in 0 s, last state: {run}/state/global_step_1" in said[0]
    assert "exit status 137; restart 2 of 10" in said[1] and said[1].endswith("global_step_2")
    first = (tmp_path / "starts").read_text().splitlines()[0]
    assert first == f"trainer.default_local_dir={run} trainer.default_local_dir={run} trainer.resume_mode=auto"


@pytest.mark.parametrize("status", [0, 2, 126, 127, 130])
def test_what_another_start_cannot_help_is_not_restarted(status: int, tmp_path: Path) -> None:
    assert supervise(tmp_path, str(status)) == (status, 1, [])


def test_restarts_are_counted_and_the_pause_doubles(tmp_path: Path) -> None:
    status, starts, said = supervise(tmp_path, "3", "--max_restarts", "2", "--backoff_s", "1", saves="1 2 3")
    assert (status, starts) == (3, 3)
    assert "restart 1 of 2 in 1 s" in said[0] and "restart 2 of 2 in 2 s" in said[1]
    assert "gave up after exit status 3: 2 restarts were allowed" in said[2] and "global_step_3" in said[2]


@pytest.mark.parametrize("run", ["run", "run/seed=0"])
def test_three_starts_in_a_row_without_a_new_state_are_enough(run: str, tmp_path: Path) -> None:
    status, starts, said = supervise(tmp_path, "1", saves="1 4", run=run)
    assert (status, starts) == (1, 7), "the state of start 4 begins the count anew"
    assert "3 starts in a row saved no new state" in said[-1]
    assert f"Last state: {tmp_path}/{run}/state/global_step_4." in said[-1]


def test_a_run_that_never_saved_names_the_folder(tmp_path: Path) -> None:
    status, starts, said = supervise(tmp_path, "kill")
    assert (status, starts) == (137, 3)
    assert f"Last state: none in {tmp_path}/run." in said[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_and_ends_the_supervisor(number: signal.Signals, tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        command(tmp_path), env=environment(tmp_path, "wait"), stdout=subprocess.PIPE, text=True, preexec_fn=_heed
    )
    wait_for(tmp_path / "waits")
    supervisor.send_signal(number)
    said, _ = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, said) == (130, f"clean end by {int(number)}\n")
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_a_signal_during_the_pause_ends_it(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        command(tmp_path, "--backoff_s", "600"), env=environment(tmp_path, "1"), stderr=subprocess.PIPE, text=True
    )
    assert supervisor.stderr is not None
    assert "restart 1 of 10 in 600 s" in supervisor.stderr.readline()
    supervisor.terminate()
    try:
        assert supervisor.wait(timeout=60) == 143
    finally:
        supervisor.kill()
    assert len((tmp_path / "starts").read_text().splitlines()) == 1
    supervisor.stderr.close()


def test_what_a_killed_run_leaves_behind_is_ended_before_the_next_start(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, subprocess, sys\n"
        "note = pathlib.Path(os.environ['FOLDER']) / 'left'\n"
        "if note.exists(): sys.exit(0)\n"
        "note.write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(command(tmp_path, program=program), env=environment(tmp_path, ""), timeout=120, check=False)
    assert done.returncode == 0
    wait_for_end(int((tmp_path / "left").read_text()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "true"], "does not set trainer.default_local_dir"),
        (["--max_restarts", "-1", "--", "true"], "--max_restarts is '-1'"),
        (["--backoff_s"], "--backoff_s is ''"),
        (["python"], "unknown argument python"),
        (["--"], "no command"),
        ([], "no command"),
        (["--", "true", "trainer.default_local_dir=a/${b}"], "must be the path itself"),
        (["--", "true", "trainer.default_local_dir=a,b", "-m"], "'a,b' gives the runs of a sweep several folders"),
        (["--", "true", "-m", "trainer.default_local_dir=a,b"], "'a,b' gives the runs of a sweep several folders"),
        (["--", "true", "--multirun", "hydra.sweep.dir=choice(a,b)"], "gives the runs of a sweep several folders"),
        (["--", "true", "hydra.sweep.dir=a/${b}"], "hydra.sweep.dir='a/${b}' must be the path itself"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/run_with_restart.sh"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr


def test_the_users_resume_mode_and_a_relative_folder(tmp_path: Path) -> None:
    arguments = ["trainer.default_local_dir=a", "trainer.default_local_dir=b", "trainer.resume_mode=disable"]
    script = ["bash", str(ROOT / "scripts/run_with_restart.sh"), "--", "echo", *arguments]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [*arguments, f"trainer.default_local_dir={tmp_path}/b"]


@pytest.mark.parametrize(
    ("written", "folder"),
    [("'runs/x'", "{}/runs/x"), ('"/runs/x"', "/runs/x"), ("'~/x'", "/home/me/x"), ("~", "/home/me"), ("~x", "{}/~x")],
)
def test_the_folder_as_the_trainer_reads_it(tmp_path: Path, written: str, folder: str) -> None:
    script = ["bash", str(ROOT / "scripts/run_with_restart.sh"), "--", "echo", f"trainer.default_local_dir={written}"]
    variables = os.environ | {"HOME": "/home/me"}
    done = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=True)
    key, expected = "trainer.default_local_dir", folder.format(tmp_path)
    assert done.stdout == f"{key}={written} {key}={expected} trainer.resume_mode=auto\n"


def test_a_comma_in_the_folder_of_a_run_that_is_no_sweep(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "scripts/run_with_restart.sh"), "--", sys.executable, "-m", "this"]
    script.append("trainer.default_local_dir=a,b")
    subprocess.run(script, cwd=tmp_path, capture_output=True, timeout=60, check=True)


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_the_folder_by_hydras_names(key: str, tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "scripts/run_with_restart.sh"), "--", "echo", f"{key}=a"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{key}=a {key}={tmp_path}/a trainer.resume_mode=auto\n"


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def _heed() -> None:
    """A test run in the background of a shell passes on that Ctrl-C is to be ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
