"""What operations do: floating-point operations, bytes that go through the device's memory, bytes between ranks.

A product's operations are counted by PyTorch's own formulas; attention is causal, so half of the square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from verl.planning.dry_run.torch_private import CollectiveOp, collective_ops, operation_name, sync_ops, tree_leaves

aten = torch.ops.aten
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # products of [L, L] by [L, D] in attention; the backward makes one again


@dataclass(frozen=True)
class Operation:
    """The work of one kernel: `flops` in the format `dtype`, and `num_bytes` read and written."""

    flops: float
    dtype: torch.dtype
    num_bytes: int


@dataclass
class Work:
    """The operations since the last `restart`. `sent`: bytes of the whole tensor by kind of collective."""

    operations: list[Operation] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> float:
        return sum(operation.flops for operation in self.operations)

    def lessen(self, kinds: Collection[str], factor: float) -> None:
        """Count only a fraction of the collectives of these kinds, rounded."""
        for counts in (self.sent, self.calls):
            for kind in counts.keys() & set(kinds):
                counts[kind] = round(factor * counts[kind])

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Operation | None:
        """Count one operation of the device; None if it has no kernel of its own."""
        if func in collective_ops:
            self._collective(func, args, kwargs, out)
            return None
        if func.is_view:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = tensors[0].dtype if tensors else torch.float32
        self.operations.append(Operation(_flops(func, args, kwargs, out), dtype, num_bytes))
        return self.operations[-1]

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if func not in sync_ops:
            name = collective_kind(str(func))
            self.sent[name] += CollectiveOp.get_comm_tensor_size(func, out, args, kwargs)
            self.calls[name] += 1


def collective_kind(collective: str) -> str:
    """The kind of a collective: all-gather, reduce-scatter, all-reduce, all-to-all, or the operation's own name."""
    plain = collective.replace("_", "").lower()
    kinds = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce"}
    kinds["alltoall"] = "all-to-all"
    return next((kind for part, kind in kinds.items() if part in plain), collective)


def workspace_bytes(func: Any, args: Sequence[Any]) -> int:
    """The bytes that the CUDA kernel of an attention's backward takes for itself: for the query's gradient in float32,
    and, with fewer key heads than query heads, for gradients of keys and values for every query head.
    """
    name = operation_name(func)
    if name not in _ATTENTION or not _ATTENTION[name].backward:
        return 0
    query, key = args[1], args[2]
    heads = _ATTENTION[name].heads
    expanded = 0 if query.shape[heads] == key.shape[heads] else 2 * query.numel() * query.element_size()
    return int(query.numel() * 4 + expanded)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class _Attention:
    """The arguments of an attention operation: the dimension of its heads, and the longest row's length."""

    heads: int
    backward: bool
    longest: Callable[[Sequence[Any]], int]


_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(1, False, lambda args: args[0].shape[2]),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(1, True, lambda args: args[1].shape[2]),
    "torch_attn::_varlen_attn": _Attention(1, False, lambda args: args[5]),
    "torch_attn::_varlen_attn_backward": _Attention(1, True, lambda args: args[8]),
}


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    name = operation_name(func)
    attention = _ATTENTION.get(name)
    if attention is not None:
        query = args[1 if attention.backward else 0]
        products = BACKWARD_PRODUCTS if attention.backward else FORWARD_PRODUCTS
        return products * query.numel() * attention.longest(args)  # 2 per product and value, half of them masked
    if name == "mkldnn::_linear_pointwise":
        return 2.0 * out.numel() * args[0].shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    if name in _PRODUCTS:  # without an `out_dtype`, which the formulas do not know
        return float(formula(*(arg for arg in args if isinstance(arg, torch.Tensor)), out_val=out))
    return float(formula(*args, **kwargs, out_val=out))
