"""Linear layers with weights packed for oneDNN: bfloat16 encoders on a CPU.

`torch.nn.Linear` repacks its weight in every call, which for the few hundred tokens of a batch of queries costs as much
as the product. Here it is packed once, and the GELU after a layer is applied while the product is still in the cache,
before it is rounded.
"""

from __future__ import annotations

from typing import Literal

import torch
from transformers.activations import GELUActivation


class PackedLinear(torch.nn.Module):
    """x W^T + b, then GELU if requested, for bfloat16 [..., in_features] on a CPU. For inference only."""

    def __init__(self, linear: torch.nn.Linear, activation: Literal["none", "gelu"] = "none") -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """bfloat16 [..., out_features]."""
        kind = "none" if self._activation == "gelu" else ""  # of the GELU: the exact one, not that by tanh
        return torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, self._activation, [], kind)  # type: ignore[no-any-return]


@torch.inference_mode()
def pack_linear_layers(model: torch.nn.Module) -> bool:
    """Replace every bfloat16 linear layer on a CPU, and the exact GELU that follows one in the blocks of BERT.

    Returns whether any layer was replaced: none on a CPU that is too old for oneDNN's bfloat16 (without AVX-512 and
    AVX-NE-CONVERT), where PyTorch's own layers compute.
    """
    found = False
    for name, child in list(model.named_children()):
        if (
            type(child) is torch.nn.Linear
            and child.weight.device.type == "cpu"
            and child.weight.dtype == torch.bfloat16
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            fused = name == "dense" and isinstance(getattr(model, "intermediate_act_fn", None), GELUActivation)
            setattr(model, name, PackedLinear(child, "gelu" if fused else "none"))
            if fused:
                model.intermediate_act_fn = torch.nn.Identity()
            found = True
        else:
            found |= pack_linear_layers(child)
    return found
