"""The weights of a sharded model as a stream of bytes through one rank, and safetensors files made of that stream.

Shards are rows of a weight, so the shards of all ranks in order are the weight as stored in a file: the writing rank
needs memory for one shard of one weight, the others for none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.engine.device.sharding import RowShards, is_main_rank, local, row_shards

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One weight in a file."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@torch.no_grad()
def stream(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat CPU tensors on the main rank: the values of all tensors in order. Other ranks send theirs and yield none.

    Every rank must exhaust the iterator.
    """
    for tensor in tensors:
        for part in _parts(tensor):
            yield part.cpu().contiguous().flatten()


def write_safetensors(path: Path, entries: Sequence[Entry], parts: Iterator[torch.Tensor]) -> None:
    """Write the next values of `parts`, which are those of `entries`, in order."""
    with path.open("wb") as file:
        file.write(_header(entries))
        left = sum(entry.num_bytes for entry in entries)
        while left > 0:
            part = next(parts)
            file.write(part.view(torch.uint8).numpy().data)
            left -= part.nbytes


def _header(entries: Sequence[Entry]) -> bytes:
    """The head of a file: a length, then JSON that ends on a multiple of 8 bytes
    (https://github.com/huggingface/safetensors).
    """
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        described[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    shards = row_shards(tensor)
    if shards is not None:
        yield from _received(shards) if is_main_rank() else _sent(shards)
    else:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield from [whole.detach()] if is_main_rank() else []


def _received(shards: RowShards) -> Iterator[torch.Tensor]:
    """The shards in the order of the rows."""
    own = local(shards.tensor)
    for place, rank in enumerate(shards.ranks):
        rows = shards.rows_at(place)
        if rank == dist.get_rank():
            yield own
        elif rows.start < rows.stop:
            part = own.new_empty((rows.stop - rows.start, *shards.tensor.shape[1:]))
            dist.recv(part, src=rank)
            yield part


def _sent(shards: RowShards) -> Iterator[torch.Tensor]:
    """Send this rank's shard and yield nothing; the main rank has the shards of its own replica."""
    own = local(shards.tensor)
    if own.numel() and shards.replica == 0:
        dist.send(own.contiguous(), dst=0)
    yield from ()
