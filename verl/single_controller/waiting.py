"""Waiting for Ray calls with a deadline, so that a dead or stuck worker is an error that names the phase."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.errors import VerlError, WorkerError


def wait_for(references: list[Any], phase: str, timeout_s: float) -> list[Any]:
    """Results of all references, in order.

    A typed error raised by a worker is raised here as itself. A worker that died, or did not answer within
    `timeout_s` seconds, is a `WorkerError` that names `phase`.
    """
    try:
        return ray.get(references, timeout=timeout_s)
    except GetTimeoutError as error:
        raise WorkerError(
            f"{phase}: no answer within {timeout_s:.0f} s; raise trainer.step_timeout_s if the step is that long"
        ) from error
    except RayActorError as error:
        raise WorkerError(f"{phase}: a worker process ended: {error}") from error
    except RayTaskError as error:
        if isinstance(error.cause, VerlError):
            raise error.cause from error
        raise
