"""Causal attention inside each of several rows that lie one after the other, as a Hugging Face attention function.

On CUDA in a 16-bit format the work is done by PyTorch's variable-length kernel (torch.nn.attention.varlen). Everywhere
else rows go one by one through scaled_dot_product_attention, or through two products where that takes less time: the
same interface and the same numbers up to rounding.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from verl.engine.batching import SharedKeys
from verl.engine.device.runtime import kind_of
from verl.engine.device.sequence_parallel import SequenceGroup
from verl.engine.hf_model import head_size
from verl.engine.transformers_private import attention_implementation, keeps_state, lets_attention_be_chosen
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "varlen"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MASKED_LENGTH = 512  # tokens that PyTorch's CPU kernel takes at a time: no row up to it is faster for being causal
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
    shared_keys: SharedKeys | None = None,
    sequence: SequenceGroup | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D] from `query` [1, heads, T, D], `key` and `value` [1, fewer or as many heads, T, D].

    `row_lengths`: tokens of each row, on the host; `cu_seq_lens_q` [rows + 1] int32: where they begin, on the device;
    `max_length_q`: the longest. `shared_keys`: rows see tokens of other rows before their own. With a `sequence` group
    T is this rank's slice of the rows, which are the group's.
    Raises ConfigError when the model wants what this attention does not do.
    """
    # What this function cannot do must not pass unnoticed: the model would train on wrong numbers.
    if row_lengths is None or cu_seq_lens_q is None or max_length_q is None:
        raise ConfigError(f"{type(module).__name__} was not told where its rows begin; set use_remove_padding=False")
    given = others | {"attention_mask": attention_mask}
    if wanted := [name for name in NOT_IMPLEMENTED if given.get(name) is not None]:
        raise ConfigError(f"{type(module).__name__} asks its attention for {wanted[0]}; set use_remove_padding=False")

    # In a sequence group, all tokens of some heads for the attention, then some tokens of all heads again.
    if sequence is not None:
        query, key, value = sequence.scatter_heads(query, key, value)
    if _kernel_takes(query.device, query.dtype, query.shape[-1]):
        queries = cu_seq_lens_q, max_length_q
        keys = queries if shared_keys is None else (shared_keys.starts, shared_keys.longest)
        if shared_keys is not None:  # indexing, unlike index_select, has a deterministic backward on CUDA
            key, value = (x.transpose(1, 2)[:, shared_keys.tokens].transpose(1, 2) for x in (key, value))
        output = _by_kernel(query, key, value, queries, keys, scaling, sliding_window)
    else:
        prefix_spans = [slice(0, 0)] * len(row_lengths) if shared_keys is None else shared_keys.prefix_spans
        output = _row_by_row(query, key, value, row_lengths, prefix_spans, scaling, sliding_window)
    return output if sequence is None else sequence.gather_heads(output), None


AttentionInterface.register(NAME, varlen_attention)


def use_varlen_attention(models: Sequence[PreTrainedModel], keep_flash: bool) -> bool:
    """Let all models attend within packed rows, if each of them can; otherwise log which one cannot, and why.

    `keep_flash`: a model that runs flash-attention 2 keeps it, with which rows cannot share keys.
    """
    reasons = {type(model).__name__: why for model in models if (why := why_not_packed(model))}
    for name, why in reasons.items():
        logger.warning("rows are padded, not packed: %s %s (use_remove_padding=False says so as well)", name, why)
    if reasons:
        return False
    for model in models:
        if not (keep_flash and attention_implementation(model.config) == "flash_attention_2"):
            model.set_attn_implementation(NAME)
    return True


def attention_in_words(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """The attention that the model's passes on `device` in `dtype` use."""
    name, config = attention_implementation(model.config), model.config.get_text_config()
    if name != NAME:
        return f"{name} of transformers"
    if _kernel_takes(device, dtype, head_size(config)):
        return "PyTorch's variable-length kernel"
    short = f", rows of up to {MASKED_LENGTH} tokens by products" if _short_by_products(device, dtype) else ""
    return f"PyTorch's scaled_dot_product_attention, row by row{short}"


def why_not_packed(model: PreTrainedModel) -> str | None:
    """The reason why the model cannot tell packed rows apart; None if it can."""
    # Linear attention (Qwen3.5, Qwen3-Next): PyTorch's implementation in transformers drops where rows begin without a
    # word, and the convolution before the fast kernel is not told of it either.
    config = model.config.get_text_config()
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return "has layers of linear attention, whose state would run on from row to row"
    if keeps_state(model):
        return "keeps a state that runs through all tokens of a row"
    if other := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"has layers of type {', '.join(sorted(other))}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its attention logits"
    told = _told_to_attention(model)
    if "s_aux" in told:
        return "has attention sinks"
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    has_window = getattr(config, "sliding_window", None) and "sliding_attention" in layer_types
    if has_window and told and "sliding_window" not in told:
        return "has a sliding window, of which it tells its attention by a mask only"
    if not lets_attention_be_chosen(model):
        return "does not let its attention be chosen"
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "does not take the positions of its tokens"
    return None


def _told_to_attention(model: PreTrainedModel) -> set[object]:
    """The names of arguments that the code of the model's attention layers gives to the functions that it calls.

    Only a forward pass shows what a layer gives; its code shows it before any weights are loaded.
    """
    layers = {type(module) for module in model.modules() if "Attention" in type(module).__name__}
    forwards: list[Any] = [inspect.unwrap(layer.forward) for layer in layers]
    constants = [constant for forward in forwards for constant in forward.__code__.co_consts]
    return {name for constant in constants if isinstance(constant, tuple) for name in constant}


def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_lengths: Sequence[int],
    prefix_spans: Sequence[slice],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The attention [1, T, heads, D] of each row by itself."""
    short_by_products = _short_by_products(query.device, query.dtype)
    grouped = query.shape[1] != key.shape[1]

    # All short rows that need a mask take theirs from the end of one.
    sizes = list(row_lengths)
    masked = [
        span.stop - span.start + own
        for span, own in zip(prefix_spans, sizes, strict=True)
        if span.stop or sliding_window is not None or short_by_products
    ]
    short = max((keys for keys in masked if keys <= MASKED_LENGTH), default=0)
    short_mask_SS = _mask(short, short, sliding_window, query)

    # Rows that share a prefix share the views of it too.
    prefixes = {(s.start, s.stop): (query[:, :, s], key[:, :, s], value[:, :, s]) for s in prefix_spans if s.stop}
    outputs = []
    own_parts = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), prefix_spans, strict=True)
    for q, k, v, span in own_parts:
        # The prefix's keys and values come first. Its queries are computed again, and dropped below, where that takes
        # less time than a mask without them: in rows so long that `is_causal` saves half.
        own = q.shape[2]
        if span.stop:
            prefix_q, prefix_k, prefix_v = prefixes[span.start, span.stop]
            k, v = torch.cat([prefix_k, k], 2), torch.cat([prefix_v, v], 2)
            if MASKED_LENGTH < k.shape[2] < 2 * own:
                q = torch.cat([prefix_q, q], 2)

        # `is_causal` needs as many queries as keys; a mask says where there are fewer, or a window.
        length, keys = q.shape[2], k.shape[2]
        is_short = keys <= MASKED_LENGTH
        by_products = short_by_products and is_short
        mask_LK = None
        if by_products or length < keys or (sliding_window is not None and length > sliding_window):
            mask_LK = short_mask_SS[keys - length : keys, :keys] if is_short else _mask(length, keys, sliding_window, q)
        if by_products and mask_LK is not None:
            output = _by_products(q, k, v, mask_LK, scaling)
        else:
            output = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask_LK, is_causal=mask_LK is None, scale=scaling, enable_gqa=grouped
            )
        outputs.append(output[:, :, -own:].transpose(1, 2))
    return torch.cat(outputs, 1)


def _short_by_products(device: torch.device, dtype: torch.dtype) -> bool:
    """PyTorch's CPU kernel takes 2.5 times as long as two products for short rows in bfloat16; in float32 it wins."""
    return dtype is torch.bfloat16 and device.type == "cpu"


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask_LK: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The attention [1, heads, L, D] of one row as its formula says it: the queries of all heads that share a key head
    are rows of the same product.
    """
    _, heads, length, size = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    query_GRD = (query * (size**-0.5 if scaling is None else scaling)).reshape(key_heads, -1, size)
    scores_HLK = (query_GRD @ key[0].transpose(1, 2)).view(heads, length, keys)
    weights_GRK = (scores_HLK + mask_LK).softmax(-1).view(key_heads, -1, keys)
    return (weights_GRK @ value[0]).view(1, heads, length, -1)


def _mask(length: int, seen: int, sliding_window: int | None, like: torch.Tensor) -> torch.Tensor:
    """[L, K], to be added to scores: the last L of K tokens see themselves and all before them, with a window
    `sliding_window` tokens at most.
    """
    position_K = torch.arange(seen, device=like.device)
    distance_LK = position_K[seen - length :, None] - position_K
    hidden_LK = (distance_LK < 0) | (distance_LK >= (sliding_window or max(1, seen)))
    return torch.zeros_like(hidden_LK, dtype=like.dtype).masked_fill_(hidden_LK, -math.inf)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: tuple[torch.Tensor, int],
    keys: tuple[torch.Tensor, int],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The attention [1, T, heads, D] of all rows by one kernel. `queries` and `keys`: where each row's begin, and the
    most that one has; its queries are its last keys.
    """
    head_size, value_size = query.shape[-1], value.shape[-1]
    value = functional.pad(value, (0, head_size - value_size))  # the kernel has one head size for all three
    output_THD = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        queries[0],
        keys[0],
        queries[1],
        keys[1],
        scale=scaling,
        # The kernel counts the keys on each side of a query, a sliding window the query itself as well.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_THD, torch.Tensor)  # a tuple only when auxiliary output is requested
    return output_THD[None, ..., :value_size]


def _kernel_takes(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    if kind_of(device) != "cuda":
        return False
    fits = head_size <= KERNEL_LARGEST_HEAD and head_size % KERNEL_HEAD_STEP == 0
    takes = fits and dtype in KERNEL_DTYPES
    if takes and device.type == "cuda":  # a CPU that stands for a GPU stands for a recent one
        takes = torch.cuda.get_device_capability(device) >= KERNEL_CAPABILITY
    if not takes:
        _say_slow(dtype, head_size)
    return takes


@cache
def _say_slow(dtype: torch.dtype, head_size: int) -> None:
    logger.warning(
        "the variable-length attention kernel takes bfloat16 and float16, heads of up to 256 in steps of 8, and GPUs "
        "from compute capability 8.0; here (%s, heads of %d) attention goes row by row, which is slower",
        dtype,
        head_size,
    )
