"""What a worker of a run is doing, read from its process title, which Ray sets to the method that is running.

A title is made of the method itself: tests that wait for a method that was renamed fail as they are imported.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from watched_run import WatchedRun

from verl.rollout.worker import RolloutWorker
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker

Phase = tuple[str, ...]  # titles of which any one will do
LOOK_S = 0.5  # between two searches for workers: a search takes longer than some phases


def title(worker: type, method: Callable[..., Any] | None = None) -> str:
    """Without a method, the beginning of all titles of the worker."""
    return f"ray::{worker.__name__}" + (f".{method.__name__}" if method else "")


TRAINER, SAMPLER = title(ActorWorker), title(RolloutWorker)

START = (title(RolloutWorker, RolloutWorker.start),)
ROLLOUT = (title(RolloutWorker, RolloutWorker.play),)
UPDATE = tuple(title(ActorWorker, method) for method in (ActorWorker.update_and_score, ActorWorker.update))
CRITIC_UPDATE = (title(CriticWorker, CriticWorker.update),)
EXPORT = (title(ActorWorker, ActorWorker.export_weights),)
LOAD_WEIGHTS = (title(RolloutWorker, RolloutWorker.load_weights),)
SAVE = (title(ActorWorker, ActorWorker.save),)


def title_of(process: psutil.Process) -> str:
    """Empty when it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def stop_those_in(phase: Phase, workers: Iterable[psutil.Process], number: int = 1) -> list[psutil.Process]:
    """Stop (SIGSTOP) the workers that are in `phase`; none when they are fewer, or one was faster."""
    found = [worker for worker in workers if title_of(worker) in phase]
    if len(found) < number:
        return []
    for worker in found:
        _stop(worker)
    if all(title_of(worker) in phase for worker in found):
        return found
    resume(found)
    return []


def stop_in(
    phase: Phase, run: WatchedRun, workers: Callable[[], list[psutil.Process]], number: int = 1
) -> list[psutil.Process]:
    """Wait until so many of a run's `workers` are in the phase at once, or more; those, stopped there."""
    found, known, looked_at = list[psutil.Process](), list[psutil.Process](), 0.0

    def caught() -> bool:
        nonlocal known, looked_at
        if time.monotonic() > looked_at + LOOK_S:
            known, looked_at = workers(), time.monotonic()
        found[:] = stop_those_in(phase, known, number)
        return bool(found)

    run.wait_until(caught)
    return found


def resume(workers: Iterable[psutil.Process]) -> None:
    """Those that are still there."""
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process that does nothing within the block."""
    _stop(process)
    try:
        yield
    finally:
        resume([process])


def _stop(process: psutil.Process) -> None:
    """SIGSTOP; returns when it stands still: each of its threads runs on until it gets a core and takes the signal."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        while not _stands_still(process.pid):
            time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    """Or has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread, or all of it, has just ended
        stats = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(") ")[2][0] in "TZX" for stat in stats)
    return False


@contextlib.contextmanager
def standing_still(workers: Sequence[psutil.Process]) -> Iterator[Sequence[psutil.Process]]:
    """Workers that were stopped: what happens meanwhile happens in their phase."""
    phases = [title_of(worker) for worker in workers]
    try:
        yield workers
        left = [title_of(worker) for worker in workers]
        assert all(now in ("", phase) for now, phase in zip(left, phases, strict=True)), (phases, left)
    finally:
        resume(workers)


def kill(process: psutil.Process) -> None:
    """SIGKILL; returns when it has ended."""
    process.kill()
    wait_for_end(process.pid)


def wait_for_end(pid: int) -> None:
    """A killed process is there until its threads have had a core; its parent, if busy, need not notice its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + 60
        while has_not_ended(process):
            assert time.monotonic() < deadline, f"still running: {process}"
            time.sleep(0.01)


def has_not_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
