"""CPU memory that any process can open by its name, as any process on a node can open GPU memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

ATTEMPTS, TOO_SLOW = 30, "Shared memory manager connection has timed out"  # after a second, however busy the machine
PATIENT = "asks_again"


def share_by_name() -> None:
    """In this process, from now on."""
    mp.set_sharing_strategy("file_system")
    storage: Any = torch.UntypedStorage
    if not hasattr(storage._share_filename_cpu_, PATIENT):
        storage._share_filename_cpu_ = patient(storage._share_filename_cpu_)
        storage._new_shared_filename_cpu = staticmethod(patient(storage._new_shared_filename_cpu))


def patient(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, asked again while PyTorch's memory manager is too slow."""

    @functools.wraps(call)
    def asks_again(*args: Any, **named: Any) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call(*args, **named)
            except RuntimeError as error:
                if TOO_SLOW not in str(error) or attempt == ATTEMPTS:
                    raise

    setattr(asks_again, PATIENT, True)
    return asks_again
