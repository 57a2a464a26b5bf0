"""Random states that can be saved and put back, and kernels that add in the same order every time."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

# Read by cuBLAS when CUDA starts, and by transformers' flash attention.
CUDA_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def seed_everything(seed: int) -> None:
    """Seed the generators that Python, NumPy and PyTorch (all devices) share within this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Use kernels that give the same bits for the same input; an operation that has none raises RuntimeError.

    On CUDA, `CUDA_ENVIRONMENT` has to be in the environment before the device is used.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def random_state() -> dict[str, torch.Tensor]:
    """States of the shared generators by name (python, numpy, torch, and cuda where it is), each [n] uint8."""
    _, words, gauss = random.getstate()
    python = [*words, math.nan if gauss is None else gauss]
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    mersenne = legacy["state"]
    states = {
        "python": _as_bytes(python),
        "numpy": _as_bytes([*mersenne["key"].tolist(), mersenne["pos"], legacy["has_gauss"], legacy["gauss"]]),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_state` returned; generators that are not named stay as they are."""
    # The 3 is the version of Python's own format; its None was stored as NaN.
    if "python" in states:
        *words, gauss = _as_numbers(states["python"])
        random.setstate((3, tuple(int(word) for word in words), None if math.isnan(gauss) else gauss))
    if "numpy" in states:
        *key, pos, has_gauss, gauss = _as_numbers(states["numpy"])
        mersenne = {"key": np.array(key, np.uint32), "pos": int(pos)}
        np.random.set_state(
            {"bit_generator": "MT19937", "state": mersenne, "has_gauss": int(has_gauss), "gauss": gauss}
        )
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _as_bytes(numbers: list[float]) -> torch.Tensor:
    """Numbers as the bytes of doubles, which hold 32-bit words exactly."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _as_numbers(state: torch.Tensor) -> list[float]:
    numbers: list[float] = state.view(torch.float64).tolist()
    return numbers
