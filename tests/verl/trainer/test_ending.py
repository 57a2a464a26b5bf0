"""How a run ends: its status, its last words, its last lines, and signals at any moment."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from e2e_world import ROOT
from run_config import run_config

from program_end import exit_status
from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentUnavailable,
    NumericalError,
    RewardError,
    StorageError,
    TrainingCollapsed,
    WorkerError,
)
from verl.process.interrupts import StopAfterStep, heed_interrupts, interrupts_at_the_end
from verl.run.checkpoints import Checkpoints
from verl.tracking.background_writer import BackgroundWriter
from verl.trainer import ending as ending_module
from verl.trainer import main_ppo, rl_trainer
from verl.trainer.ending import ending, finish_writing_on_failure


def leave(run_dir: Path, *records: dict[str, float]) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_came_of_a_run_and_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "a run"
    leave(
        run_dir,
        {"step": 0, "val/test_score/mean": 0.5},
        {"step": 1, "critic/score/mean": 0.25, "timing_s/step": 40.2},
        {"step": 2, "critic/score/mean": 0.75, "timing_s/step": 45.0, "val/test_score/mean": 0.625},
    )
    model = run_dir / "actor" / "global_step_2"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert ending(run_dir, run_dir / "report.md").splitlines() == [
        "done: 2 steps in 1 min 25 s, without validation and saving",
        "  reward        0.250 (step 1) -> 0.750 (step 2)",
        "  val           0.500 (step 0) -> 0.625 (step 2)",
        f"  model         {model}",
        f"  report        {run_dir / 'report.md'}",
        f"  trajectories  .venv/bin/search-r1 view '{run_dir}'",
        f"  a question    .venv/bin/search-r1 infer --run '{run_dir}' --question \"...\"",
    ]


def test_what_a_question_needs_is_told(tmp_path: Path) -> None:
    """If the run could not see how its retriever was started, or uses none of its own."""
    leave(run_dir := tmp_path / "run", {"step": 0, "val/test_score/mean": 0.5})

    def told(do_search: bool = True, tools: list[str] | None = None, **retriever: str | None) -> bool:
        settings = {"url": "http://h:1/retrieve", "engine": None, "launch": None} | retriever
        agent = {"format": "tags" if tools is None else "chat", "tools": tools or ["search"]}
        config = {"do_search": do_search, "retriever": settings, "agent": agent}
        (run_dir / "config.yaml").write_text(json.dumps(config))
        lines = ending(run_dir, run_dir / "report.md").splitlines()
        return lines[-1].endswith('--question "..."   (while a retriever answers at http://h:1/retrieve)')

    assert told() and told(tools=["calculator", "search"])
    assert not told(tools=["calculator"])
    assert not told(do_search=False) and not told(engine="mine.Engine") and not told(launch="bash serve.sh")
    (run_dir / "retriever.json").write_text("{}")
    assert not told()


def test_a_run_that_only_validates_has_no_model(tmp_path: Path) -> None:
    leave(tmp_path / "run", {"step": 0, "val/test_score/mean": 0.5})
    lines = ending(tmp_path / "run", tmp_path / "run" / "report.md").splitlines()
    assert lines[:2] == ["done: validated, nothing trained", "  val           0.500 (step 0)"]
    assert not any(line.strip().startswith("model") for line in lines)


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl is missing"):
        ending(tmp_path, tmp_path / "report.md")


def status_of(error: BaseException | None) -> int:
    def run() -> None:
        if error is not None:
            raise error

    return exit_status(run, when_interrupted="all is kept")


NEEDS_A_PERSON = (ConfigError, DataError, RewardError, TrainingCollapsed)
MAY_PASS = (CheckpointError, EnvironmentUnavailable, NumericalError, WorkerError)


@pytest.mark.parametrize("kind", [*NEEDS_A_PERSON, *MAY_PASS])
def test_what_a_person_has_to_change_is_2_and_what_may_pass_1(kind: type[Exception]) -> None:
    assert status_of(kind("x")) == (2 if kind in NEEDS_A_PERSON else 1)


def test_the_end_the_interruption_and_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(None) == 0
    assert status_of(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted: all is kept\n"
    with pytest.raises(ZeroDivisionError):
        status_of(ZeroDivisionError())


def test_one_line_without_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    status_of(DataError("http://user:hunter2-hunter2@h/x is gone"))
    assert capsys.readouterr().err == "error: http://***@h/x is gone\n"


def test_the_last_words_of_an_interrupted_run_agree_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> NoReturn:
        raise KeyboardInterrupt

    own = [f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    assert main_ppo.main(own, adapt=interrupt) == 130
    assert capsys.readouterr().err == "interrupted: nothing was started\n"
    monkeypatch.setattr(main_ppo, "run", interrupt)
    assert main_ppo.main(own) == 130
    said = capsys.readouterr().err
    assert (
        said.startswith("interrupted: no checkpoint was saved yet") and "intact" not in said and said.count("\n") == 1
    )
    (tmp_path / "state" / "global_step_7").mkdir(parents=True)
    assert main_ppo.main(own) == 130
    assert capsys.readouterr().err.endswith(f"resumes from {tmp_path}/state/global_step_7\n")


def no_state(run_dir: Path) -> Checkpoints:
    """Of a run that has saved nothing yet, whose roles nobody asks."""
    return Checkpoints(run_dir, cast(Any, None), None, with_anchor=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("of the run"), TrainingCollapsed("a"), KeyError()])
def test_files_that_were_handed_over_are_written_first(tmp_path: Path, error: BaseException) -> None:
    writer = BackgroundWriter()

    def slow() -> None:
        time.sleep(0.1)
        (tmp_path / "file").touch()

    with pytest.raises(type(error)) as caught, finish_writing_on_failure(tmp_path, no_state(tmp_path), writer):
        writer.hand_over(slow)
        raise error
    assert caught.value is error
    assert (tmp_path / "file").exists()
    writer.close()


def test_an_error_of_the_writer_is_told_beside_that_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(KeyError),
        finish_writing_on_failure(tmp_path, no_state(tmp_path), writer),
    ):
        writer.hand_over(lambda: int("no number"))
        raise KeyError
    assert any(
        "trajectories of the latest steps could not be saved: invalid literal" in line for line in caplog.messages
    )
    writer.close()


def test_an_interrupted_run_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "INTERRUPT_WAIT_S", 0.3)
    writer, answers = BackgroundWriter(), threading.Event()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), finish_writing_on_failure(tmp_path, no_state(tmp_path), writer):
        writer.hand_over(answers.wait)
        raise KeyboardInterrupt
    assert 0.3 <= time.monotonic() - start < 60
    assert any("could not be saved: 1 files were not written within" in line for line in caplog.messages)
    answers.set()
    writer.close()


PROGRAM = """
import signal
import sys
import threading
import weakref
from program_end import exit_status
from verl.process.interrupts import heed_interrupts

number, drops_in = getattr(signal, sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(*_):
    signal.raise_signal(number)

class Object:
    if drops_in == "finalizer":
        __del__ = interrupt

def train():
    heed_interrupts()
    some = Object()
    watch = weakref.ref(some, interrupt) if drops_in == "weakref callback" else None
    if drops_in == "nothing":
        interrupt()
    del some
    print("dropped", flush=True)
    threading.Event().wait(60)

sys.exit(exit_status(train, "as asked"))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("drops_in", ["finalizer", "weakref callback", "nothing"])
def test_an_interrupt_is_heeded(number: str, drops_in: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, number, drops_in], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted: as asked\n")
    assert done.stdout == ("" if drops_in == "nothing" else "dropped\n")


def test_what_else_is_dropped_is_printed_as_ever() -> None:
    program = """
from verl.process.interrupts import heed_interrupts

class Broken:
    def __del__(self):
        raise ValueError("of a finalizer")

heed_interrupts()
Broken()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "Exception ignored" in done.stderr and "ValueError: of a finalizer" in done.stderr


LEAVES = """
import atexit
import sys
import threading
import time
from verl.process.startup import leave

class ClearedAway:
    def __del__(self):
        print("cleared away")

def work():
    time.sleep(0.3)
    print("thread")

kept = ClearedAway()
atexit.register(print, "exit function")
threading.Thread(target=work).start()
print("begun")
leave(3)
"""


def test_a_program_that_leaves_waits_for_its_threads_and_clears_no_modules_away() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "begun\nthread\nexit function\n", "")


@pytest.mark.parametrize("way", ["program", "module", "run by another"])
def test_only_a_program_leaves(way: str, tmp_path: Path) -> None:
    """What another program runs as a module is that program's to end."""
    (tmp_path / "leaves.py").write_text("from verl.process.startup import leave\nleave(3)\n")
    (tmp_path / "other.py").write_text(
        "import runpy\n"
        "try:\n    runpy.run_path('leaves.py', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code)\n"
    )
    words = {"program": ["leaves.py"], "module": ["-m", "leaves"], "run by another": ["other.py"]}[way]
    where: Any = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False, **where)
    assert (done.returncode, done.stdout) == ((0, "3\n") if way == "run by another" else (3, "")), done.stderr


def test_a_program_leaves_with_its_status_when_nobody_reads_its_output() -> None:
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", LEAVES]
    program = subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert (program.wait(120), program.stderr.read()) == (3, b"")
    program.stderr.close()


GRACEFUL = """
import signal
import sys
import time
from verl.process.startup import log_to_stderr
from program_end import exit_status
from verl.process.interrupts import StopAfterStep, heed_interrupts

grace_s, step_s, signals = float(sys.argv[1]), float(sys.argv[2]), [getattr(signal, n) for n in sys.argv[3].split(",")]

def train():
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has let its background ignore
    heed_interrupts()
    with StopAfterStep(grace_s) as stop:
        for index, number in enumerate(signals):
            if index:
                time.sleep(0.3)  # so that they are not the same one, which came twice
            signal.raise_signal(number)
        time.sleep(step_s)
        print("step done", stop.requested, flush=True)

sys.exit(exit_status(train, "as asked"))
"""


@pytest.mark.parametrize(
    ("grace_s", "step_s", "signals", "expected"),
    [
        ("500", "0", "SIGTERM", (0, "step done True\n")),
        ("21", "400", "SIGTERM", (130, "")),  # after a second: the last 20 are for what is being written
        ("20", "400", "SIGTERM", (130, "")),
        ("0", "400", "SIGTERM", (130, "")),
        ("500", "400", "SIGTERM,SIGTERM", (130, "")),
        ("500", "400", "SIGTERM,SIGINT", (130, "")),
        ("500", "400", "SIGINT", (130, "")),
    ],
)
def test_the_step_in_hand_is_finished_after_sigterm(
    grace_s: str, step_s: str, signals: str, expected: tuple[int, str]
) -> None:
    command = [sys.executable, "-c", GRACEFUL, grace_s, step_s, signals]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)  # a step would take longer
    assert (done.returncode, done.stdout) == expected, done.stderr
    assert ("a second signal ends it at once" in done.stderr) == (float(grace_s) > 20 and signals != "SIGINT")


class LastStep:
    """Stands for a run that has done `steps_done` of 3 steps: what is done with it is in `calls`."""

    total_steps, decode = 3, None

    def __init__(self, run_dir: Path, steps_done: int, evaluation_is_left: bool) -> None:
        self.run_dir, self.steps_done, self.evaluation_is_left = run_dir, steps_done, evaluation_is_left
        self.calls: list[tuple[Any, ...]] = []
        self.sources: dict[str, str] = {}
        self.checkpoints = SimpleNamespace(steps=[3] * (steps_done == 3), save=self._save, settle=self._nothing)
        self.checkpoints.save_state = self._save_state
        self.evaluator = SimpleNamespace(
            policy_is_due=lambda step, last: last,
            anchor_is_due=lambda step: False,
            validate=lambda step, timed: self._call("validate", step) | {"val/test_score/mean": 0.5},
            test=lambda step, timed: self._call("test", step),
        )
        self.source = SimpleNamespace(
            engines=lambda timed: contextlib.nullcontext(), state=lambda: SimpleNamespace(to_json=dict)
        )
        self.performance = SimpleNamespace(metrics=lambda *_: {}, write_timeline=self._nothing)
        self.tracker = SimpleNamespace(
            log=self._nothing, log_samples=self._nothing, finish=self._nothing, now_in=self._nothing
        )
        self.writer = SimpleNamespace(drain=self._nothing)
        guard = SimpleNamespace(state_dict=dict)
        self.recovery = SimpleNamespace(watch=lambda *_: {}, act=self._nothing, guard=guard)
        self.estimator = SimpleNamespace(kl_weight=SimpleNamespace(value=0.0))

    def _call(self, *call: Any) -> dict[str, float]:
        self.calls.append(call)
        return {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    def _save(self, step: int) -> None:
        self.checkpoints.steps.append(step)

    def _save_state(self, step: int, progress: dict[str, Any], score: float | None) -> None:
        self._call("save", step, score, progress["evaluation_is_left"])


@pytest.mark.parametrize(
    ("steps_done", "is_left", "signalled", "expected"),
    [
        (2, False, False, [("validate", 3), ("test", 3), ("save", 3, 0.5, False)]),
        (2, False, True, [("save", 3, None, True)]),
        (3, True, False, [("validate", 3), ("test", 3), ("save", 3, 0.5, False)]),
        (3, False, False, []),
    ],
    ids=["as ever", "SIGTERM in the last step", "resumed after that", "resumed when complete"],
)
def test_the_last_step_is_saved_after_sigterm_and_evaluated_when_the_run_is_resumed(
    steps_done: int,
    is_left: bool,
    signalled: bool,
    expected: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train_step(*_: Any) -> tuple[Any, ...]:
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(work=None, sampled=[]), None, {}

    run = LastStep(tmp_path, steps_done, is_left)
    monkeypatch.setattr(rl_trainer, "Run", lambda *_: run)
    monkeypatch.setattr(rl_trainer, "write_report", lambda run_dir: run_dir)
    monkeypatch.setattr(rl_trainer.RLTrainer, "train_step", train_step)
    inputs: Any = None
    trainer = rl_trainer.RLTrainer(run_config(["trainer.val_before_train=false"]), "cpu", inputs)
    with restored_handlers():
        heed_interrupts()
        with pytest.raises(KeyboardInterrupt) if signalled else contextlib.nullcontext():
            assert trainer.fit() == tmp_path
    assert run.calls == expected


def test_a_step_that_is_longer_than_the_notice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of the 120 s of a scheduler, 100 are for the step. Who has set nothing is not told of the default's 10 s."""
    StopAfterStep(30).compare(500)
    stop = StopAfterStep(120)
    stop.compare(99)
    assert not caplog.records
    stop.compare(101)
    stop.compare(102)
    [record] = caplog.records
    assert "a step took 101 s, but SIGTERM leaves 100 s to finish one" in record.getMessage()


def test_a_signal_that_is_passed_on_twice_is_one() -> None:
    """A supervisor passes it on, and so does the process group."""
    with restored_handlers(), StopAfterStep(100) as stop:
        heed_interrupts()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


def test_signals_wait_for_the_end_of_a_block() -> None:
    with restored_handlers():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        heed_interrupts()
        done = []
        with pytest.raises(KeyboardInterrupt), interrupts_at_the_end():
            signal.raise_signal(signal.SIGINT)
            done.append("the line and its state")
        assert done
        with StopAfterStep(100) as stop:
            with interrupts_at_the_end():
                signal.raise_signal(signal.SIGTERM)
                assert not stop.requested
            assert stop.requested
        with pytest.raises(ZeroDivisionError), interrupts_at_the_end():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """Ctrl-C, in the background of a shell."""
    with restored_handlers():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        heed_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    hook, handlers = sys.unraisablehook, {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
