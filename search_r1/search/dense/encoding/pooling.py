"""One vector per text from the hidden states of its tokens. Legend: B texts, L tokens, D values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pool(output: Any, mask_BL: torch.Tensor, pooling: str) -> torch.Tensor:
    """float32 [B, D] from a model's output; padding is on the right and is ignored."""
    if pooling == "pooler":
        return output.pooler_output.float()
    return _POOLERS[pooling](output.last_hidden_state.float(), mask_BL)


def _mean(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    weight_BL1 = mask_BL.unsqueeze(-1).to(hidden_BLD.dtype)
    return (hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)


def _max(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _last(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return hidden_BLD[torch.arange(len(hidden_BLD), device=hidden_BLD.device), mask_BL.sum(1) - 1]


_POOLERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean,
    "max": _max,
    "lasttoken": _last,
    "cls": lambda hidden_BLD, mask_BL: hidden_BLD[:, 0],
}
