"""When the driver last got something done: what a watchdog looks at."""

from __future__ import annotations

import time

_latest = time.monotonic()


def note_progress() -> None:
    global _latest
    _latest = time.monotonic()


def seconds_without_progress() -> float:
    return time.monotonic() - _latest
