"""FSDP2 around a model: float32 master shards on every rank, gathered layer by layer when they are needed.

With hybrid sharding (HSDP) a group of ranks, those of a node, holds the model; the other groups hold replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from verl.engine.device.runtime import Precision
from verl.engine.device.torch_private import compute_local_shape_and_global_offset

logger = logging.getLogger(__name__)


def shard(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision, min_num_params: int = 0
) -> None:
    """Shard `model`, whose decoder layers are `layers`, in place over `mesh`.

    Each decoder layer of at least `min_num_params` parameters is one unit; all else (embedding, norm, head, small
    layers) is the root unit. The root stays gathered from its forward to its backward, which recomputes the head's
    chunks; and an exact KL reads the anchor's head after the anchor's forward. So after passes without a backward,
    `reshard` must release it before its weights change. With one rank in a shard group nothing is released early. A
    unit's weights are gathered while the unit before it computes.
    """
    mixed = MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    layers = [layer for layer in layers if num_parameters(layer) >= min_num_params]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=mesh.size(-1) > 1)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    if mesh.size(-1) > 1:
        _prefetch([model, *layers])
    over = " x ".join(str(size) for size in mesh.shape)
    logger.info("sharded %d parameters over %s ranks, %d units", num_parameters(model), over, len(layers) + 1)


def _prefetch(units: Sequence[nn.Module]) -> None:
    """Gather weights one unit ahead. FSDP2 by itself gathers a unit's weights when the host calls the unit, which may
    be late.
    """
    sharded = [unit for unit in units if isinstance(unit, FSDPModule)]
    for unit, following in pairwise(sharded):
        unit.set_modules_to_forward_prefetch([following])
    for unit, following in pairwise([sharded[0], *sharded[:0:-1]]):
        unit.set_modules_to_backward_prefetch([following])


def reduce_gradients(model: nn.Module, last: bool, every_time: bool) -> None:
    """Set, before the backward of a micro-batch, how its gradients are reduced. Those of the `last` one of a mini-batch
    are reduced over all ranks. Earlier ones are reduced within a shard group only (`every_time`), and each rank
    accumulates its shard; or not at all, and each rank accumulates whole gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or every_time, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)


def num_parameters(module: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def reshard(model: nn.Module) -> None:
    """Release all gathered weights, so that the next forward gathers what the shards hold then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def end_reading(model: nn.Module) -> None:
    """Like `reshard`, after forward passes without a backward: FSDP2 records their order for a backward, and would keep
    it forever. Does nothing for a model that uses the layers of another, whose backward may still follow.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor, without gradient history, sharing memory.

    Off-loaded, it lies on another device than the DTensor says: PyTorch then detaches the part, but not the DTensor.
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(frozen=True)
class RowShards:
    """A weight whose rows are split over the ranks of a group, in order.

    groups: the ranks of each group by place; all groups hold the same. replica, place: this rank's group and place.
    """

    tensor: DTensor
    groups: list[list[int]]
    replica: int
    place: int

    @property
    def ranks(self) -> list[int]:
        """The ranks of this rank's group."""
        return self.groups[self.replica]

    def rows_at(self, place: int) -> slice:
        each = -(-self.tensor.shape[0] // len(self.ranks))  # as torch.chunk cuts: only the last shards are smaller
        ends = (min(self.tensor.shape[0], each * number) for number in (place, place + 1))
        return slice(*ends)

    @property
    def values(self) -> slice:
        """The values that this rank holds, counted row by row."""
        rows, size = self.rows_at(self.place), self.tensor.numel() // max(1, self.tensor.shape[0])
        return slice(rows.start * size, rows.stop * size)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.tensor.device_mesh.get_group(-1)


def row_shards(tensor: torch.Tensor) -> RowShards | None:
    """How the rows of a weight are split. None for one that is not: every rank has all of it, or the model splits it in
    its own way.
    """
    if not isinstance(tensor, DTensor) or tensor.placements[-1] != Shard(0):
        return None
    if not all(placement.is_replicate() for placement in tensor.placements[:-1]):
        return None
    mesh, size = tensor.device_mesh, tensor.device_mesh.size(-1)
    replica, place = divmod(mesh.mesh.flatten().tolist().index(dist.get_rank()), size)
    return RowShards(tensor, mesh.mesh.view(-1, size).tolist(), replica, place)


def own_values(tensor: torch.Tensor) -> slice:
    """The values of a weight, counted row by row, that belong to this rank; each value belongs to exactly one rank.

    If every rank has the whole weight, all values belong to the main rank; of several replicas, to the first.
    """
    shards = row_shards(tensor)
    if shards is None:
        return slice(0, tensor.numel() if is_main_rank() else 0)
    return slice(shards.values.start, shards.values.stop if shards.replica == 0 else shards.values.start)


@torch.no_grad()
def on_mesh(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without gradient history; the local part of a sharded one is on its mesh's device."""
    part = local(tensor)
    return sharded_like(tensor, part.to(tensor.device_mesh.device_type)) if isinstance(tensor, DTensor) else part


def sharded_like(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """The whole of which `part`, on the mesh's device, is this rank's part, sharded as `tensor` is."""
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_index(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def is_main_rank() -> bool:
    """Whether this process writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0
