"""Waiting for Ray calls with a deadline, so that a dead or stuck worker is an error that names the phase."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl.errors import Stalled, VerlError, WorkerDied
from verl.process.watchdog import note_progress
from verl.single_controller.cluster import ray_folder

log = logging.getLogger(__name__)

START_S = 60.0
LAST_LINES = 3
FETCH_S = 1.0  # minimum timeout, for results that are available
OTHERS_S = 2.0  # how long the failure of one worker may take to show after another has failed because of it


@dataclass(frozen=True)
class Call:
    """A call that workers have started. Calling it returns their results, as `wait_for` does, at most `timeout_s`
    seconds after they started.
    """

    references: list[Any]
    phase: str
    timeout_s: float
    since: float = field(default_factory=time.monotonic)

    def __call__(self) -> list[Any]:
        return wait_for(self.references, self.phase, self.timeout_s, self.since)


def wait_beside(call: Call, others: Sequence[Call]) -> list[Any]:
    """The results of `call`. If one of `others`, which run meanwhile, fails, that is raised at once."""
    left = call.references
    theirs = [reference for other in others for reference in other.references]
    while left and theirs:
        done = wait_for_any([*left, *theirs], call.phase, call.timeout_s, call.since)
        for one in (call, *others):
            if any(_failure(reference) for reference in one.references if reference in done):
                one()
        left, theirs = ([one for one in references if one not in done] for references in (left, theirs))
    return call()


def wait_for(references: list[Any], phase: str, timeout_s: float, since: float | None = None) -> list[Any]:
    """Results of all references, in order.

    A typed error of a worker is raised here unchanged. A dead worker raises `WorkerDied`, and so does a call that Ray
    ended for another reason; one that did not answer within `timeout_s` seconds from now, or from `since`
    (`time.monotonic`), raises `Stalled`. All name `phase`.
    """
    note_progress()
    passed_s = 0.0 if since is None else time.monotonic() - since
    try:
        return ray.get(references, timeout=max(FETCH_S, timeout_s - passed_s))
    except RayError as error:
        # When a worker dies, or fails with a typed error, the others' collectives fail: the cause is what to report.
        known = as_verl_error(error, phase, timeout_s) or _cause_among(references, phase, timeout_s)
        if known is None:
            raise
        raise known from error
    finally:
        note_progress()


def as_verl_error(error: RayError, phase: str, timeout_s: float) -> VerlError | None:
    """The error that `wait_for` raises for one of Ray. None: the worker's own code raised one that is not typed."""
    if isinstance(error, GetTimeoutError):
        return _stalled(phase, timeout_s)
    # An error within the call: a typed one is raised as it is, one of Ray is looked at in turn.
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, VerlError):
            return error.cause
        return as_verl_error(error.cause, phase, timeout_s) if isinstance(error.cause, RayError) else None
    # Ray ends its messages with general advice, which the ones below replace.
    told = " ".join(str(error).partition("Some common causes")[0].split())
    if isinstance(error, OutOfMemoryError):
        told = told.partition(" Object store memory usage")[0]
        return WorkerDied(
            f"{phase}: Ray ended a worker process because the machine was running out of memory. Give the run less to "
            "hold (actor_rollout_ref.rollout.kv_cache_gib, num_engines, fewer workers), or let Ray wait longer with "
            f"RAY_memory_usage_threshold (a share of the memory; 0.95 unless set). Ray says: {told}"
        )
    if isinstance(error, RayActorError):
        return WorkerDied(
            f"{phase}: a worker process ended; it was killed (out of memory? see dmesg) or it crashed (its log "
            f"is in {ray_folder()}/session_latest/logs). Ray says: {told}"
        )
    return WorkerDied(
        f"{phase}: Ray ended the call ({type(error).__name__}); its logs are in {ray_folder()}/session_latest/logs. "
        f"Ray says: {told}"
    )


def wait_for_start(workers: Sequence[Any], name: str, timeout_s: float) -> None:
    """Wait until the processes of actors run. A warning a minute says how many do not, and quotes Ray's own log. Raises
    `Stalled` after `timeout_s`.
    """
    # This method of every actor answers as soon as its process runs.
    coming = [worker.__ray_ready__.remote() for worker in workers]
    since = time.monotonic()
    while True:
        _, coming = ray.wait(coming, num_returns=len(coming), timeout=min(START_S, timeout_s))
        if not coming:
            return
        seconds = time.monotonic() - since
        which = f"{len(coming)} of {len(workers)} processes of {name}"
        message = f"{which} have not started after {seconds:.0f} s. {_end_of_ray_log()}"
        if seconds >= timeout_s:
            raise Stalled(message)
        log.warning(message)
        # Waiting for Ray is no hang that the watchdog should end.
        note_progress()


def _end_of_ray_log() -> str:
    """The end of the log of Ray's own process on this node that starts workers."""
    of_this_run = list(ray_folder().glob(f"session_*_{os.getpid()}"))  # a cluster that was joined has another name
    file = (of_this_run[-1] if of_this_run else ray_folder() / "session_latest") / "logs" / "raylet.err"
    try:
        lines = file.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        return f"Ray's log cannot be read: {error}"
    return f"{file} ends with: {' | '.join(lines)}" if lines else f"{file} is empty"


def put(value: Any, what: str) -> ray.ObjectRef:
    """`ray.put`, with a typed error that says `what` was put: the object store or its disk may be full."""
    try:
        return ray.put(value)
    except RayError as error:
        raise as_verl_error(error, what, 0.0) or error from None


def wait_for_any(references: list[Any], phase: str, timeout_s: float, since: float) -> list[Any]:
    """The references that are done, at least one; `wait_for` gets their results.

    Raises `Stalled` when there is none `timeout_s` seconds after `since`, a time of `time.monotonic`.
    """
    note_progress()
    ready, others = ray.wait(references, num_returns=1, timeout=max(0.0, since + timeout_s - time.monotonic()))
    if not ready:
        raise _stalled(phase, timeout_s)
    ready += ray.wait(others, num_returns=len(others), timeout=0)[0] if others else []
    note_progress()
    return ready


def _failure(reference: Any) -> RayError | None:
    """The error of a finished call; None if it did not fail."""
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _stalled(phase: str, timeout_s: float) -> Stalled:
    return Stalled(
        f"{phase}: no answer within {timeout_s:.0f} s; raise trainer.step_timeout_s if the step really takes longer"
    )


def _cause_among(references: list[Any], phase: str, timeout_s: float) -> VerlError | None:
    ready, _ = ray.wait(references, num_returns=len(references), timeout=OTHERS_S)
    failures = (_failure(reference) for reference in ready)
    known = (as_verl_error(failure, phase, timeout_s) for failure in failures if failure)
    return next((error for error in known if error), None)
