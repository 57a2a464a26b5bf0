"""The private names of PyTorch that the dry run uses: seeing every operation, on tensors without memory and between
processes that are not there, has no public interface.

`tests/verl/test_private_names.py` checks that the installed PyTorch has them, with these signatures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import active_fake_mode  # DTensor computes shapes under a mode of its own
from torch._ops import OpOverload  # the class of the operations that are seen
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # tensors without memory
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops  # ranks that are not there
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.testing._internal.distributed.fake_pg import FakeStore  # the store of the "fake" process group
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation
from torch.utils._pytree import tree_leaves  # the tensors in an operation's arguments

__all__ = [
    "CollectiveOp",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "active_fake_mode",
    "collective_ops",
    "sync_ops",
    "tree_leaves",
]

READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `Tensor.item` calls
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view that is not said to be one
WAIT = torch.ops._c10d_functional.wait_tensor.default  # waits for a collective


def operation_name(func: Any) -> str:
    """The operation's name without its overload, which the public `name()` adds."""
    return str(func._schema.name)


def changes_an_input(func: OpOverload) -> bool:
    """Whether the operation writes to one of its inputs."""
    return bool(func._schema.is_mutable)


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that all Python objects of one storage share; its address does not tell: fake tensors have none."""
    return storage._cdata


@contextlib.contextmanager
def cut_for_rank_0() -> Iterator[None]:
    """Context in which FSDP2 makes the shard of rank 0 alone. It makes those of all ranks to take its own: with
    thousands of ranks that takes minutes.
    """
    original = _fsdp_param._chunk_with_empty

    def first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]

    _fsdp_param._chunk_with_empty = first_chunk
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


@contextlib.contextmanager
def no_strided_shards() -> Iterator[None]:
    """Context in which DTensor does not look for strided shards, which FSDP2 alone never makes. It looks for them in
    all weights again for each weight of an optimizer's step: a fifth of the dry run of a model with 64 layers.
    """
    original = _sharding_prop._propagate_use_strided_shard_flag
    _sharding_prop._propagate_use_strided_shard_flag = lambda op_strategy, op_schema: None
    try:
        yield
    finally:
        _sharding_prop._propagate_use_strided_shard_flag = original
