"""Several processes that do one task, forked from a server that has already imported what they need.

A process that starts on its own imports torch, transformers and this project for several seconds; a forked one begins
at once. It is as new: the server has imported modules and done nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.multiprocessing

# Of this repository, each with all that it imports.
IMPORTED = ["verl.engine.policy_engine", "verl.engine.value_engine", "verl.workers.critic", "engine_state"]


def run_forked(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `function(rank, *arguments)` in `count` processes. The first error of one ends all and is raised here."""
    _start_server()
    torch.multiprocessing.start_processes(function, arguments, count, start_method="forkserver")


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
