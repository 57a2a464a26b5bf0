"""The private names of vLLM that sampling uses, besides `Scheduler._update_request_with_output`, which `TurnScheduler`
overrides.

`tests/verl/test_private_names.py` checks that the installed vLLM has them, with these signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.request import Request


def sampled_ids(request: Request) -> list[int]:
    """The ids sampled so far, as a list: `output_token_ids` wraps it, which costs time for every token."""
    return request._output_token_ids


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """[B]: ids sampled from float32 logits [B, V], row by row from the seeds [B]; only the compiled operation draws the
    same numbers as vLLM's sampler.
    """
    return torch.ops._C.fused_gumbel_argmax(logits, seeds)  # type: ignore[no-any-return]
