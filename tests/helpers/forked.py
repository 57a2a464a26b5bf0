"""Processes that begin at once: forked from one that has imported what takes seconds, and has done nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOADED = ["pytest", "torch.distributed.tensor", "transformers", "verl.workers.actor", "verl.rollout.weight_sync"]


def forked() -> ForkServerContext:
    """In the place of `multiprocessing.get_context("spawn")`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


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
