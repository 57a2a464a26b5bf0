"""Threads for third-party functions, which may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """At most `number` threads, started on demand. Unlike those of an executor, they never delay the process's exit."""

    def __init__(self, number: int) -> None:
        self._number, self._started = number, 0
        self._waiting: SimpleQueue[_Work] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run `function` when a thread is free; if its future is cancelled before that, it never runs."""
        future: Future[Any] = Future()
        self._waiting.put((future, function, arguments))
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._started < self._number:
                self._started += 1
                threading.Thread(target=self._work, name="search-engine", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, function, arguments = self._waiting.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:  # it belongs to the one who waits
                    future.set_exception(error)
            self._idle.release()
