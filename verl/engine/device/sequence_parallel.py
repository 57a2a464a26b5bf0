"""Sequence parallelism (Ulysses, arXiv 2309.14509): a group of ranks shares rows, and each has a slice of the tokens.

The rows of a micro-batch are packed into one row of T tokens, padded to a multiple of the group's size. A rank has
T / size of them wherever tokens are computed independently. For attention, an all-to-all gives it all tokens of
heads / size heads instead. The outputs for the selected tokens are gathered, and every rank of the group computes the
same loss on whole rows.

In the backward each rank takes the part of that loss's gradient that belongs to its slice, without a sum. So the
parameters' gradients of a group add up to the gradient of its loss, counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig

from verl.errors import ConfigError


@dataclass(frozen=True)
class SequenceGroup:
    """A group of `size` consecutive ranks; this one is number `place`."""

    process_group: dist.ProcessGroup = field(repr=False)
    size: int
    place: int

    def scatter_heads(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Turn each [1, heads, T / size, D] of this rank's tokens into [1, heads / size, T, D] of all tokens.

        Where there are fewer key and value heads (GQA), they are repeated until each rank has those that its query
        heads read.
        """
        times = [self.size // gcd(x.shape[1], self.size) for x in inputs]
        repeated = [x if n == 1 else x.repeat_interleave(n, 1) for x, n in zip(inputs, times, strict=True)]
        # Each [size, n, (heads / size) D]: the heads of each rank.
        outgoing = [x[0].unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2) for x in repeated]
        arrived_TC = _exchanged(torch.cat(outgoing, -1), self).flatten(0, 1)
        columns = arrived_TC.split([part.shape[-1] for part in outgoing], -1)
        return [
            column.unflatten(-1, (-1, x.shape[-1])).transpose(0, 1)[None]
            for column, x in zip(columns, repeated, strict=True)
        ]

    def gather_heads(self, output_1ThD: torch.Tensor) -> torch.Tensor:
        """[1, T / size, heads, D] of this rank's tokens from [1, T, heads / size, D] of all tokens."""
        parts = output_1ThD[0].unflatten(0, (self.size, -1))
        return _exchanged(parts, self).transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True)
class SequenceShare:
    """This rank's slice of a micro-batch. `counts`: how many of its N selected tokens are in each rank's slice."""

    group: SequenceGroup
    counts: tuple[int, ...]

    @property
    def own(self) -> slice:
        """The part of the N selected tokens that is in this rank's slice."""
        start = sum(self.counts[: self.group.place])
        return slice(start, start + self.counts[self.group.place])

    def gather(self, value_n: torch.Tensor) -> torch.Tensor:
        """[N, ...] on every rank of the group, from each rank's values [n, ...] of its own tokens. The loss must be the
        same on all of them; its gradient returns to the rank that has the value.
        """
        gathered_N: torch.Tensor = _Gather.apply(value_n, self)
        return gathered_N


def sequence_group(device: torch.device, size: int) -> SequenceGroup | None:
    """This rank's group; None for a group of one. A collective of all ranks. Raises ConfigError when `size` does not
    divide their number.
    """
    if size == 1:
        return None
    num_ranks = dist.get_world_size()
    if num_ranks % size:
        raise ConfigError(
            f"ulysses_sequence_parallel_size is {size}; it must divide the number of workers, {num_ranks}"
        )
    mesh = init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("rows", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"), size, mesh.get_local_rank("sequence"))


def require_divisible_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError for a model whose heads `size` ranks cannot share equally."""
    heads = getattr(config, "num_attention_heads", None)
    if size > 1 and (heads is None or heads % size):
        raise ConfigError(
            f"ulysses_sequence_parallel_size is {size}; it must divide the number of attention heads of the "
            f"model ({heads or 'not in its config.json'}), because each rank of a group computes some of them"
        )


def _exchanged(parts_S: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Send part r of `parts_S` to rank r; part r of the result came from there."""
    exchanged_S: torch.Tensor = _AllToAll.apply(parts_S, group)
    return exchanged_S


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts. Its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, parts_S: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        parts_S = parts_S.contiguous()
        arrived_S = torch.empty_like(parts_S)
        dist.all_to_all_single(arrived_S, parts_S, group=group.process_group)
        return arrived_S

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_n: torch.Tensor, share: SequenceShare) -> torch.Tensor:
        ctx.share = share
        most, group = max(share.counts), share.group
        own_M = value_n.new_zeros(most, *value_n.shape[1:])
        own_M[: len(value_n)] = value_n
        all_SM = value_n.new_empty(group.size * most, *value_n.shape[1:])
        dist.all_gather_single(all_SM, own_M, group=group.process_group)
        parts = all_SM.unflatten(0, (group.size, most))
        return torch.cat([part[:count] for part, count in zip(parts, share.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.share.own], None
