"""Processes that begin at once: forked from a server that has imported what they need, and has done nothing else.

A process that starts on its own imports torch, transformers and this project for several seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

# Each with all that it imports.
IMPORTED = [
    *("pytest", "torch.distributed.tensor", "transformers", "engine_state"),
    *("verl.engine.policy_engine", "verl.engine.value_engine", "verl.workers.critic", "verl.rollout.weight_sync"),
]


def forked() -> ForkServerContext:
    """In the place of `multiprocessing.get_context("spawn")`."""
    _start_server()
    return mp.get_context("forkserver")


def run_forked(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `function(rank, *arguments)` in `count` processes. The first error of one ends all and is raised here."""
    _start_server()
    torch.multiprocessing.start_processes(function, arguments, count, start_method="forkserver")


@contextlib.contextmanager
def ranks(number: int, target: Callable[..., None], *args: object) -> Iterator[list[ForkServerProcess]]:
    """So many processes, each of which calls `target` with its rank and `args`. They are killed in the end."""
    processes = [forked().Process(target=target, args=(rank, *args), daemon=True) for rank in range(number)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid:
                process.kill()
                process.join()


def _start_server() -> None:
    """With the paths of this process, which the server does not take over by itself; once started it stays."""
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
    try:
        forkserver.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = given
