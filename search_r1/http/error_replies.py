"""How a client deals with an error reply: its message, whether to retry, and when."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

SHOWN_CHARS = 300  # of a message
_TRY_LATER = frozenset({408, 425, 429})  # of the statuses that blame the client: too slow, too early, too many requests
_NEVER = frozenset({501, 505, 510, 511})  # of those that blame the server: it cannot do this at all
# 413, 414, 431: too long. 451: its content. 400, 422: either, or a request that is wrong whatever it asks.
_BLAMES_CONTENT = frozenset({400, 413, 414, 422, 431, 451})
_MOST_DOUBLINGS = 10


def is_temporary(status: int) -> bool:
    """Whether a request that had this HTTP status may succeed later, as it is.

    Proxies have statuses of their own from 520 on (unreachable, timed out, overloaded).
    """
    return status in _TRY_LATER or (status >= 500 and status not in _NEVER)


def may_blame_query(status: int) -> bool:
    """Whether a refusal with this HTTP status may be due to the length or the content of a query.

    It may also be due to the settings of the request, as all queries have them: another query tells.
    """
    return status in _BLAMES_CONTENT


def server_message(payload: bytes) -> str:
    """The server's message in an error reply: its `detail`, or the start of its text."""
    text = payload.decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["detail"])
    return text[:SHOWN_CHARS].strip() or "no message"


def retry_after_s(header: str | None) -> float:
    """Seconds to wait by a Retry-After header (seconds or an HTTP date); 0 if there is none, or it cannot be read."""
    if not header:
        return 0.0
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def backoff_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after attempt 1, 2, ...: exponential, capped, with jitter against retries in lockstep."""
    return min(longest_s, first_s * 2 ** min(attempt - 1, _MOST_DOUBLINGS)) * random.uniform(0.5, 1.0)
