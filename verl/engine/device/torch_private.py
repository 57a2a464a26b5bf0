"""The private names of PyTorch that the engine uses, each with the reason why no public one will do.

`tests/verl/test_private_names.py` checks that the installed PyTorch has them, with these signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory  # `Tensor.pin_memory` copies, to blocks of 2^n bytes
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # nothing public tells a rank's part

__all__ = ["compute_local_shape_and_global_offset", "pin_memory", "unpin_memory"]


def set_allocator(settings: str) -> None:
    """Set the allocator of devices as PYTORCH_ALLOC_CONF does; it is read only once, when the process starts."""
    torch._C._accelerator_setAllocatorSettings(settings)


def share_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage. Its address does not tell: all empty storages have the same one."""
    return left.untyped_storage()._cdata == right.untyped_storage()._cdata


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the parameters that it sharded: only they know a shard's padding."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return [parameter for group in groups for parameter in group.fsdp_params]


def padded_shard(parameter: Any) -> torch.Tensor:
    """[n]: the memory of a shard that FSDP2 recorded, with the padding at its end."""
    flat: torch.Tensor = parameter._sharded_param_data
    return flat


def replace_padded_shard(parameter: Any, flat: torch.Tensor) -> None:
    """Let a shard that FSDP2 recorded lie in `flat` [n]; FSDP2 itself only moves whole modules, to new tensors."""
    length = parameter.sharded_param._local_tensor.shape[0]
    parameter._sharded_param_data = flat
    whole = flat.view(parameter.padded_sharded_param_size)
    parameter.sharded_param._local_tensor = whole.narrow(0, 0, length)


def local_part(tensor: DTensor) -> torch.Tensor:
    """The tensor that holds a DTensor's local part itself; `to_local` may give a view of it."""
    return tensor._local_tensor


def replace_local_part(tensor: DTensor, part: torch.Tensor) -> None:
    """Let a DTensor's local part lie in `part`: the optimizer, say, goes on with the same DTensor."""
    tensor._local_tensor = part


def apply_to_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters and buffers that `change` returns others for; `to_empty` would replace all of them."""
    model._apply(change)


def has_onednn_linear() -> bool:
    """Whether PyTorch was built with oneDNN's linear layer."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """[..., O]: x W^T + b by oneDNN, for which PyTorch has no setting: `nn.Linear` takes MKL for float32."""
    return torch.ops.mkldnn._linear_pointwise(input, weight_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]
