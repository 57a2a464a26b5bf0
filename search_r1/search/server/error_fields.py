"""What a failed search is over HTTP: of a whole request a status and a body, of one query of several a few fields."""

from __future__ import annotations

import math
from typing import Any

from search_r1.errors import (
    OnlineRejected,
    OnlineReplyError,
    OnlineUnavailable,
    ReplayMissError,
    SearchError,
    ServiceUnavailable,
)

EACH_HEADER = b"x-query-errors"  # with the value "each": the client reads the errors of single queries
_PASSING = (ServiceUnavailable, OnlineUnavailable)
_FINAL = (OnlineRejected, OnlineReplyError, ReplayMissError)


def status_of(error: SearchError) -> int:
    """503: it may pass. 424: what this server depends on failed, and would cost the same again. 500: all else."""
    if isinstance(error, _PASSING):
        return 503
    return 424 if isinstance(error, _FINAL) else 500


def retry_after_s(error: SearchError) -> float | None:
    """Seconds until a retry may help; None where that is not known."""
    return error.retry_after_s if isinstance(error, _PASSING) else None


def retry_header(error: SearchError) -> dict[str, str]:
    """Whole seconds, as HTTP has them."""
    seconds = retry_after_s(error)
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def failure(error: SearchError) -> dict[str, Any]:
    """What a reply says of one query that failed."""
    seconds = retry_after_s(error)
    retry = {} if seconds is None else {"retry_after_s": round(seconds, 3)}
    return {"status": status_of(error), "detail": str(error)} | retry
