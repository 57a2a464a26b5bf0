"""SIGTERM and Ctrl-C end a run with KeyboardInterrupt, at whatever line they reach it."""

from __future__ import annotations

import signal
import sys
import threading

RAISE_AGAIN_S = 0.1  # by then, what dropped the interrupt has returned


def heed_interrupts() -> None:
    """Let SIGTERM raise KeyboardInterrupt in the main thread, as SIGINT does; where Python drops it, raise it again.

    Python drops what finalizers and weakref callbacks raise, and these run between any two lines, often just after a
    long call in C, during which the signal has come. Call it again after a library has put its own handler there.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _heed_dropped


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _heed_dropped(dropped: sys.UnraisableHookArgs) -> None:
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    main_thread = threading.main_thread().ident
    again = threading.Timer(RAISE_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGTERM))
    again.daemon = True
    again.start()
