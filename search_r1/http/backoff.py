"""Exponential backoff with jitter."""

from __future__ import annotations

import random

_MOST_DOUBLINGS = 10


def backoff_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after attempt 1, 2, ...: exponential, capped, with jitter against retries in lockstep."""
    return min(longest_s, first_s * 2 ** min(attempt - 1, _MOST_DOUBLINGS)) * random.uniform(0.5, 1.0)
