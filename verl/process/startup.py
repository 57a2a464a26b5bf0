"""What a program logs while it starts: one line a phase, and from its libraries only what a user can act on.

    log_to_stderr()
    with phase("starting Ray"):
        ray.init(...)

writes `[  3 s] starting Ray` to standard error, with the seconds since the process began, and further lines while
a long phase lasts. Standard output stays free for the program's own output.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

import psutil

log = logging.getLogger(__name__)

BEAT_S = 10.0
DATED = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PLAIN = "%(message)s"

ENGINE_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_LOGS": "-torch._library.triton",  # a warning about a missing Triton on machines that need none
}
"""Environment variables that keep vLLM and torch quiet, here and in processes that start here. Errors still appear."""

CPU_ENGINE_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's CPU kernels tell which NUMA node their memory is on
}
"""Further ones for an engine on CPU alone: on GPUs the warnings of torch's C++ code are about NCCL."""

TALKATIVE = ("bm25s", "faiss", "httpx", "matplotlib", "vllm")
"""Libraries whose news below a warning are of no use to anybody: each request, which CPU they were built for, that
there is no Triton (vLLM, before it sets up a log of its own)."""


def log_to_stderr(form: str = DATED) -> None:
    """Lines of INFO and above go to standard error, and libraries are quiet. To be called before these are imported."""
    handler = _StderrOfNow()
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] not in TALKATIVE)
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[handler])
    quiet_libraries()


class _StderrOfNow(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to whatever `sys.stderr` is now: a progress bar takes its place, so that lines go above."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...


def quiet_libraries() -> None:
    """Keep messages out of the output that no user can act on. Settings of the user's environment stay."""
    for name, value in ENGINE_VARIABLES.items():
        os.environ.setdefault(name, value)


def tell(text: str) -> None:
    """Log a line with the seconds since this process began."""
    log.info("[%3.0f s] %s", time.time() - psutil.Process().create_time(), text)


@contextmanager
def phase(text: str) -> Iterator[None]:
    """Log a line now and, while the phase lasts, another after every ten seconds, or every minute of a long one."""
    tell(text)
    with beside(partial(_beat, text)):
        yield


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do `work` in a thread while the block lasts. The end of the block sets its event, then waits for it to return."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(text: str, over: threading.Event) -> None:
    started, beats = time.monotonic(), 0
    while not over.wait(BEAT_S):
        beats += 1
        if beats < 6 or beats % 6 == 0:
            tell(f"{text}: {time.monotonic() - started:.0f} s so far")
