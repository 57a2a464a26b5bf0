"""What a program tells while it starts: one line a phase, and from its libraries only what somebody can act on.

    log_to_stderr()
    with phase("starting Ray"):
        ray.init(...)

writes `[  3 s] starting Ray` to standard error, with the seconds since the process began, and further lines while
a long phase lasts. Standard output stays free for what the program was asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

log = logging.getLogger(__name__)

FIRST_BEAT_S, LONGEST_BEAT_S = 10.0, 60.0
DATED = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PLAIN = "%(message)s"

ENGINE_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_LOGS": "-torch._library.triton",  # that there is no Triton, told on machines that need none
}
"""What keeps vLLM and torch quiet, here and in the processes that start here. Errors are still told."""

CPU_ENGINE_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's CPU kernels tell which NUMA node their memory is on
}
"""The same for an engine on CPU alone: on GPUs the warnings of torch's C++ code are about NCCL."""

TALKATIVE = ("faiss", "httpx", "matplotlib")  # which CPU they were built for, every request, a cache of fonts


def log_to_stderr(form: str = DATED) -> None:
    """Lines of INFO and above go to standard error, and libraries are quiet. To be called before these are imported."""
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S")
    quiet_libraries()


def quiet_libraries() -> None:
    """Keep out of the output what nobody can act on. What the user set in the environment stays."""
    for name, value in ENGINE_VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def tell(text: str) -> None:
    """A line with the seconds since this process began."""
    log.info("[%3.0f s] %s", time.time() - psutil.Process().create_time(), text)


@contextmanager
def phase(text: str) -> Iterator[None]:
    """A line now, and more while the phase lasts: after ten seconds, then after twice as many, at last every minute."""
    tell(text)
    over = threading.Event()
    beats = threading.Thread(target=_beat, args=(text, over), daemon=True)
    beats.start()
    try:
        yield
    finally:
        over.set()
        beats.join()


def _beat(text: str, over: threading.Event) -> None:
    started, pause = time.monotonic(), FIRST_BEAT_S
    while not over.wait(pause):
        tell(f"{text}: {time.monotonic() - started:.0f} s so far")
        pause = min(2 * pause, LONGEST_BEAT_S)
