"""Signals that end a run: Ctrl-C at whatever line it comes, SIGTERM after the step in hand if there is time for it."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RAISE_AGAIN_S = 0.1  # by then, what dropped the interrupt has returned
SAME_SIGNAL_S = 0.2  # a supervisor and a process group both pass it on
NOTICE_S = 30.0  # the default of trainer.sigterm_grace_s
INTERRUPT_WAIT_S = 20.0  # how long an interrupted run may take to finish what it is writing

log = logging.getLogger(__name__)

_takers: list[Callable[[int], bool]] = []
"""What wants a signal before it becomes a KeyboardInterrupt, the innermost last: returns whether it took it."""
_at_once = threading.Event()  # the next signal is not for them


def heed_interrupts() -> None:
    """Let SIGTERM and SIGINT raise KeyboardInterrupt in the main thread; where Python drops it, raise it again.

    Python drops what finalizers and weakref callbacks raise, and these run between any two lines, often just after a
    long call in C, during which the signal has come. Call it again after a library has put its own handler there.
    SIGINT stays ignored where it is (in the background of a shell).
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _heed_dropped


@contextmanager
def interrupts_at_the_end() -> Iterator[None]:
    """A signal within the block is taken at its end; a second one at once."""
    came: list[tuple[int, float]] = []

    def take(number: int) -> bool:
        # What follows within a moment is the same signal, passed on twice.
        came.append((number, time.monotonic()))
        return came[-1][1] - came[0][1] < SAME_SIGNAL_S

    _takers.append(take)
    try:
        yield
    finally:
        _takers.remove(take)
    if came:
        _interrupt(came[0][0], None)


class StopAfterStep:
    """Takes the first SIGTERM within a `with` block: `requested` is then true, and the loop should end after its step.

    When the step takes too long for that, or at a second signal, a KeyboardInterrupt is raised. `grace_s`: from SIGTERM
    until whoever sent it kills the run; what is then being written needs the last `INTERRUPT_WAIT_S` of it. If there is
    not more, no signal is taken.
    """

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._wait_s = max(0.0, grace_s - INTERRUPT_WAIT_S)
        self._came = 0.0
        self._over = threading.Event()
        self._warned = grace_s <= NOTICE_S  # nobody has announced more time than any process gets

    def __enter__(self) -> StopAfterStep:
        _takers.append(self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        _takers.remove(self._take)
        self._over.set()

    def compare(self, step_s: float) -> None:
        """Warn once if a step of `step_s` seconds could not be finished after SIGTERM, although `grace_s` was set."""
        if step_s > self._wait_s and not self._warned:
            self._warned = True
            log.warning(
                "a step took %.0f s, but SIGTERM leaves %.0f s to finish one (trainer.sigterm_grace_s less the time to "
                "finish what is being written): the steps since the last checkpoint would be lost. Raise it together "
                "with the scheduler's notice, or lower trainer.save_freq",
                step_s,
                self._wait_s,
            )

    def _take(self, number: int) -> bool:
        if number != signal.SIGTERM or not self._wait_s:
            return False
        if self.requested:
            return time.monotonic() - self._came < SAME_SIGNAL_S
        self.requested, self._came = True, time.monotonic()
        threading.Thread(target=self._interrupt_when_late, daemon=True).start()  # a handler must not log itself
        return True

    def _interrupt_when_late(self) -> None:
        log.warning(
            "SIGTERM: the run ends after this step and saves it, if that takes at most %.0f s (trainer.sigterm_grace_s "
            "less the time to finish what is being written); a second signal ends it at once",
            self._wait_s,
        )
        if not self._over.wait(self._wait_s):
            _raise_in_main_thread()


def _interrupt(number: int, frame: object) -> None:
    now = _at_once.is_set()
    _at_once.clear()
    if now or not any(take(number) for take in reversed(_takers)):
        raise KeyboardInterrupt


def _heed_dropped(dropped: sys.UnraisableHookArgs) -> None:
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(RAISE_AGAIN_S, _raise_in_main_thread)
    again.daemon = True
    again.start()


def _raise_in_main_thread() -> None:
    _at_once.set()
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGTERM)
