"""Environment variables that numerical libraries read once, when they are imported."""

from __future__ import annotations

import os

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# oneDNN and PyTorch's layer above it keep code and memory of every shape they met, 1,024 of each by default. Batches of
# text have ever new shapes: hundreds of MiB, and no time won.
_KEPT_SHAPES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def prepare_libraries(num_threads: int) -> None:
    """Call this before importing torch, FAISS or numba: sets `num_threads` for each, and keeps memory from growing."""
    for variable in _THREADS:
        os.environ[variable] = str(num_threads)
    for variable in _KEPT_SHAPES:
        os.environ.setdefault(variable, "16")
