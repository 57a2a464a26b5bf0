"""How a failed search is reported over HTTP: a status and a body for a request, a few fields for one of its queries."""

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
    """The HTTP status of an error. 503: temporary. 424: a service behind this server failed, and a retry would
    cost the same. 500: all else.
    """
    if isinstance(error, _PASSING):
        return 503
    return 424 if isinstance(error, _FINAL) else 500


def retry_after_s(error: SearchError) -> float | None:
    """Seconds until a retry may help; None if unknown."""
    return error.retry_after_s if isinstance(error, _PASSING) else None


def retry_header(error: SearchError) -> dict[str, str]:
    """The header Retry-After of an error, in whole seconds; no header if it is unknown when a retry may help."""
    seconds = retry_after_s(error)
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def failure(error: SearchError) -> dict[str, Any]:
    """The fields that report one failed query in a reply."""
    seconds = retry_after_s(error)
    retry = {} if seconds is None else {"retry_after_s": round(seconds, 3)}
    return {"status": status_of(error), "detail": str(error)} | retry
