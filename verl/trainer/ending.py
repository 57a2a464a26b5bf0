"""What a run prints at its end: its results, where everything is, and which command shows it."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from verl.agent.tools.loading import need_retriever
from verl.errors import ConfigError, DataError, Stalled, TrainingCollapsed, VerlError
from verl.process.interrupts import INTERRUPT_WAIT_S
from verl.process.watchdog import collect_stacks
from verl.run import saved_state
from verl.run.checkpoints import Checkpoints
from verl.run.last_checkpoint import last_checkpoint
from verl.run.run_folder import RETRIEVER_FILE
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.report import SPLITS, TRAIN_METRIC
from verl.tracking.run_data import RunData, load_run
from verl.tracking.tracker import CONFIG_FILE

WIDTH = 14
log = logging.getLogger(__name__)


def ending(run_dir: Path, report: Path) -> str:
    """The lines that a run prints at its end, one for each thing. Raises DataError for a folder without metrics."""
    run = load_run(run_dir)
    folder = shlex.quote(str(run_dir))
    lines = [f"done: {_steps(run)}"]
    lines += [f"  {name:<{WIDTH}}{value}" for name, value in (*_scores(run), *_model(run_dir))]
    # `search-r1` as it can be typed here: that of this environment, which may not be the shell's.
    path = Path(sys.executable).with_name("search-r1")
    program = shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
    shown: dict[str, object] = {
        "report": report,
        "trajectories": f"{program} view {folder}",
        "a question": f'{program} infer --run {folder} --question "..."',
    }
    if url := _retriever_to_serve(run_dir):
        shown["a question"] = f"{shown['a question']}   (while a retriever answers at {url})"
    return "\n".join([*lines, *(f"  {name:<{WIDTH}}{value}" for name, value in shown.items())])


def _retriever_to_serve(run_dir: Path) -> str | None:
    """The address where a retriever must answer for a question; None if there is none, or one that is started by it."""
    with contextlib.suppress(OSError, TypeError, KeyError, ConfigError):
        config = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        retriever = config["retriever"]
        agent = config.get("agent", {})
        if agent.get("format") == "chat" and not need_retriever(agent["tools"]):
            return None
        started = (run_dir / RETRIEVER_FILE).is_file() or retriever["launch"] is not None
        return retriever["url"] if config["do_search"] and retriever["engine"] is None and not started else None
    return None


def _steps(run: RunData) -> str:
    seconds = run.curve("timing_s/step")
    if not seconds:
        return "validated, nothing trained"
    minutes, rest = divmod(round(sum(seconds.values())), 60)
    return f"{len(seconds)} step{'s' * (len(seconds) > 1)} in {minutes} min {rest} s, without validation and saving"


def _scores(run: RunData) -> Iterator[tuple[str, str]]:
    """The training reward, and the score of every split, as they began and ended."""
    for name, metric in (("reward", TRAIN_METRIC), *((split, f"{split}/test_score/mean") for split in SPLITS)):
        curve = run.curve(metric)
        if curve:
            first, last = min(curve), max(curve)
            later = f" -> {curve[last]:.3f} (step {last})" if last != first else ""
            yield name, f"{curve[first]:.3f} (step {first}){later}"


def _model(run_dir: Path) -> Iterator[tuple[str, str]]:
    try:
        yield "model", str(last_checkpoint(run_dir))
    except DataError:  # nothing was trained
        return


# A run that fails finishes what is being saved, and logs what happened and how to resume.


@contextlib.contextmanager
def finish_writing_on_failure(run_dir: Path, checkpoints: Checkpoints, writer: BackgroundWriter) -> Iterator[None]:
    """Context that, if its block fails or is interrupted, waits until state and files are written, and names the newest
    state.

    The wait is short after an interrupt (the entry point then names the state in its last line), and if a worker
    hangs, whose stacks are written first.
    """
    try:
        yield
    except TrainingCollapsed:
        _finish_writing(checkpoints, writer, None)
        raise
    except KeyboardInterrupt:
        log.warning("interrupted: finishing what is being written, for at most %.0f s", INTERRUPT_WAIT_S)
        _finish_writing(checkpoints, writer, INTERRUPT_WAIT_S)
        raise
    except Stalled:
        _write_stacks(run_dir)
        _finish_writing(checkpoints, writer, INTERRUPT_WAIT_S)
        _log_newest_state(run_dir)
        raise
    except Exception:
        _finish_writing(checkpoints, writer, None)
        _log_newest_state(run_dir)
        raise


def report_stall(run_dir: Path, seconds: float) -> None:
    """Report a driver that hangs, before it is ended."""
    log.error("the driver made no progress for %.0f s (trainer.step_timeout_s) and is stopped", seconds)
    _write_stacks(run_dir)
    _log_newest_state(run_dir)


def _finish_writing(checkpoints: Checkpoints, writer: BackgroundWriter, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        checkpoints.settle(wait=True, timeout_s=timeout_s)
    except VerlError as error:
        log.warning("the latest checkpoint could not be saved: %s", error)
    try:
        writer.drain(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except Exception as error:  # whatever it is, the run ends with the error that it has
        log.warning("trajectories of the latest steps could not be saved: %s", error)


def _write_stacks(run_dir: Path) -> None:
    """Write the stacks of all processes on this node to `{run folder}/stacks`."""
    paths = collect_stacks(run_dir / "stacks")
    log.error("the stacks of all processes are in %s (%s)", run_dir / "stacks", ", ".join(path.name for path in paths))


def _log_newest_state(run_dir: Path) -> None:
    log.warning(saved_state.how_to_resume(run_dir))
