"""Causal attention inside each of several rows that lie one after the other, as a Hugging Face attention function.

On CUDA in a 16-bit format the work is done by PyTorch's variable-length kernel (torch.nn.attention.varlen). Everywhere
else rows go one by one through scaled_dot_product_attention: the same interface and the same numbers up to rounding.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from verl.engine.device import kind_of
from verl.engine.sequence_parallel import SequenceGroup
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "varlen"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_LARGEST_HEAD = 256
KERNEL_HEAD_STEP = 8
KERNEL_CAPABILITY = (8, 0)
LAYER_TYPES = {"full_attention", "sliding_attention"}
NOT_IMPLEMENTED = ("attention_mask", "softcap", "s_aux", "position_bias")


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    row_lengths: Sequence[int] | None = None,
    sequence: SequenceGroup | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D] from `query` [1, heads, T, D], `key` and `value` [1, fewer or as many heads, T, D].

    `row_lengths`: tokens of each row, on the host; `cu_seq_lens_q` [rows + 1] int32: where they begin, on the device;
    `max_length_q`: the longest. With a `sequence` group T is this rank's slice of the rows, which are the group's.
    Raises ConfigError when the model wants what this attention does not do.
    """
    if row_lengths is None or cu_seq_lens_q is None or max_length_q is None:
        raise ConfigError(f"{type(module).__name__} was not told where its rows begin; set use_remove_padding=False")
    given = others | {"attention_mask": attention_mask}
    if wanted := [name for name in NOT_IMPLEMENTED if given.get(name) is not None]:
        raise ConfigError(f"{type(module).__name__} asks its attention for {wanted[0]}; set use_remove_padding=False")
    if sequence is not None:
        query, key, value = sequence.scatter_heads(query, key, value)
    if _kernel_takes(query):
        output = _by_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        output = _row_by_row(query, key, value, row_lengths, scaling, sliding_window)
    return output if sequence is None else sequence.gather_heads(output), None


AttentionInterface.register(NAME, varlen_attention)


def use_varlen_attention(models: Sequence[PreTrainedModel]) -> bool:
    """Let all models attend within packed rows, if each of them can; otherwise log which one cannot, and why.

    A model that runs flash-attention 2 keeps it.
    """
    reasons = {type(model).__name__: why for model in models if (why := why_not_packed(model))}
    for name, why in reasons.items():
        logger.warning("rows are padded, not packed: %s %s (use_remove_padding=False says so as well)", name, why)
    if reasons:
        return False
    for model in models:
        if model.config._attn_implementation != "flash_attention_2":
            model.set_attn_implementation(NAME)
    return True


def why_not_packed(model: PreTrainedModel) -> str | None:
    """What keeps the model from telling packed rows apart; None when nothing does."""
    config = model.config
    if model._is_stateful:
        return "keeps a state that runs through all tokens of a row"
    if other := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"has layers of type {', '.join(sorted(other))}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its attention logits"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        return "does not let its attention be chosen"
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "does not take the positions of its tokens"
    return None


def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_lengths: Sequence[int],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    sizes = list(row_lengths)
    outputs = []
    for q, k, v in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True):
        mask_LL = _window_mask(q.shape[2], sliding_window, query.device)
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, 1)


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """[L, L] bool: a token sees itself and the `sliding_window` - 1 before it; None when that is all before it."""
    if sliding_window is None or length <= sliding_window:
        return None
    position_L = torch.arange(length, device=device)
    distance_LL = position_L[:, None] - position_L
    return (distance_LL >= 0) & (distance_LL < sliding_window)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    head_size, value_size = query.shape[-1], value.shape[-1]
    value = functional.pad(value, (0, head_size - value_size))  # the kernel has one head size for all three
    output_THD = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_THD, torch.Tensor)  # a tuple only when auxiliary output is requested
    return output_THD[None, ..., :value_size]


def _kernel_takes(query: torch.Tensor) -> bool:
    if kind_of(query.device) != "cuda":
        return False
    head_size = query.shape[-1]
    fits = head_size <= KERNEL_LARGEST_HEAD and head_size % KERNEL_HEAD_STEP == 0
    if fits and query.dtype in KERNEL_DTYPES and _recent(query.device):
        return True
    _say_slow(query.dtype, head_size)
    return False


def _recent(device: torch.device) -> bool:
    """A CPU that stands for a GPU stands for a recent one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= KERNEL_CAPABILITY


@cache
def _say_slow(dtype: torch.dtype, head_size: int) -> None:
    logger.warning(
        "the variable-length attention kernel takes bfloat16 and float16, heads of up to 256 in steps of 8, and GPUs "
        "from compute capability 8.0; here (%s, heads of %d) attention goes row by row, which is slower",
        dtype,
        head_size,
    )
