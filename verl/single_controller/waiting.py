"""Waiting for Ray calls with a deadline, so that a dead or stuck worker is an error that names the phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from verl.errors import Stalled, VerlError, WorkerDied
from verl.single_controller.progress import note_progress

FETCH_S = 1.0  # minimum timeout, for results that are available
OTHERS_S = 2.0  # how long the death of one worker may take to show after another has failed because of it


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
            if any(_has_failed(reference) for reference in one.references if reference in done):
                one()
        left, theirs = ([one for one in references if one not in done] for references in (left, theirs))
    return call()


def wait_for(references: list[Any], phase: str, timeout_s: float, since: float | None = None) -> list[Any]:
    """Results of all references, in order.

    A typed error of a worker is raised here unchanged. A dead worker raises `WorkerDied`; one that did not answer
    within `timeout_s` seconds from now, or from `since` (`time.monotonic`), raises `Stalled`. Both name `phase`.
    """
    note_progress()
    passed_s = 0.0 if since is None else time.monotonic() - since
    try:
        return ray.get(references, timeout=max(FETCH_S, timeout_s - passed_s))
    except GetTimeoutError as error:
        raise _stalled(phase, timeout_s) from error
    except RayActorError as error:
        raise _died(phase, error) from error
    except RayTaskError as error:
        if isinstance(error.cause, VerlError):
            raise error.cause from error
        # When a worker dies, the others' collectives fail: the death is what to report.
        if death := _death_among(references):
            raise _died(phase, death) from error
        raise
    finally:
        note_progress()


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


def _has_failed(reference: Any) -> bool:
    """Whether a finished call failed."""
    try:
        ray.get(reference)
    except RayError:
        return True
    return False


def _stalled(phase: str, timeout_s: float) -> Stalled:
    return Stalled(
        f"{phase}: no answer within {timeout_s:.0f} s; raise trainer.step_timeout_s if the step really takes longer"
    )


def _died(phase: str, error: RayActorError) -> WorkerDied:
    told = " ".join(str(error).partition("Some common causes")[0].split())
    return WorkerDied(
        f"{phase}: a worker process ended; it was killed (out of memory? see dmesg) or it crashed (its log "
        f"is in /tmp/ray/session_latest/logs). Ray says: {told}"
    )


def _death_among(references: list[Any]) -> RayActorError | None:
    ready, _ = ray.wait(references, num_returns=len(references), timeout=OTHERS_S)
    for reference in ready:
        with contextlib.suppress(RayTaskError):
            try:
                ray.get(reference)
            except RayActorError as error:
                return error
    return None
