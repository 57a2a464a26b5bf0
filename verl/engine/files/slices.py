"""Between files and a sharded model, slice by slice: no rank ever holds the whole model.

Reading, each rank reads its own slices. The names in the files are translated by transformers' own rules. Where those
rules also change the layout of weights (experts that are stored one by one, say), slices of the file are not slices of
the model, so it is loaded whole.

Writing, the weights are a stream of bytes through one rank. Shards are rows of a weight, so the shards of all ranks in
order are the weight as stored in a file: the writing rank needs memory for a batch of shards of one weight, the others
for none. Shards travel in batches over the communicator that gathers the weight in a forward pass: for a single send,
NCCL makes one more communicator, with buffers on both GPUs, for each peer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import ADAPTER_CONFIG_NAME

from verl.engine.device.sharding import RowShards, is_main_rank, local, own_index, row_shards
from verl.engine.device.torch_private import apply_to_tensors
from verl.engine.files.weight_files import WeightFiles, weight_files
from verl.engine.hf_model import weights_of
from verl.engine.model import Decoder
from verl.process.inside import inside

logger = logging.getLogger(__name__)

COMPARED_VALUES = 2**22  # compared at a time, where two stored weights should be equal
BATCH_BYTES = 2**28  # of shards that the main rank receives at a time
MAIN_RANK = 0  # see `is_main_rank`

_UNREAD: ContextVar[bool] = ContextVar("unread", default=False)


def unread_weights() -> AbstractContextManager[None]:
    """Inside, models need only a config.json: their weights get memory, but no values. For measuring."""
    return inside(_UNREAD, True)


@dataclass(frozen=True)
class Slices:
    """The weights of a model in `files`: `stored` has each one's name there, or None for one that starts at zero."""

    files: WeightFiles
    stored: Mapping[str, str | None]

    @torch.no_grad()
    def fill(self, model: Decoder, device: torch.device) -> None:
        """Allocate the parameters of a blank, sharded model on `device`, and read this rank's values.

        Raises CheckpointError when a file cannot be read.
        """
        _give_memory(model, device)
        for name, tensor in weights_of(model.model):
            if name in self.stored:  # adapters are in no file
                fill_part(tensor, self.files, self.stored[name])


class Unread(Slices):
    """Weights that are not read from files."""

    def __init__(self) -> None:
        super().__init__(WeightFiles({}), {})

    def fill(self, model: Decoder, device: torch.device) -> None:
        """Allocate the parameters of a blank, sharded model on `device`, uninitialized."""
        _give_memory(model, device)


class NotSliceableError(Exception):
    """The weights of a model cannot be read by slices; the message says why."""


def find_slices(model: PreTrainedModel, source: str, new_head: bool = False) -> Slices | None:
    """The weights of a blank model in the files of a folder or hub name.

    None, with the reason in the log, if the model must be loaded whole. `new_head`: an output layer that the files
    lack starts at zero. Raises CheckpointError when a file is damaged.
    """
    if _UNREAD.get():
        return Unread()
    try:
        files = _usable_files(model, source)
        stored = _stored_names(model, files)
        absent = [name for name, where in stored.items() if where is None]
        # Only a new output layer may be absent, nothing of the decoder.
        if absent and not (new_head and not any(name.startswith(f"{model.base_model_prefix}.") for name in absent)):
            raise NotSliceableError(f"{len(absent)} weights are not in the files, the first is {absent[0]}")
        return Slices(files, stored)
    except NotSliceableError as reason:
        logger.warning("%s: every worker loads the whole model and then keeps its shard, because %s", source, reason)
        return None


@torch.no_grad()
def fill_part(tensor: torch.Tensor, files: WeightFiles, stored: str | None) -> None:
    """Copy this rank's part of a stored weight (None: zeros) into `tensor`."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if stored is None:
        part.zero_()
    elif part.numel():
        part.copy_(files.read(stored, own_index(tensor)))


def _give_memory(model: Decoder, device: torch.device) -> None:
    apply_to_tensors(model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _usable_files(model: PreTrainedModel, source: str) -> WeightFiles:
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotSliceableError("its weights are quantized")
    if getattr(model.config, "transformers_weights", None) is not None:
        raise NotSliceableError("config.json names the weight files itself")
    if (Path(source) / ADAPTER_CONFIG_NAME).is_file():
        raise NotSliceableError("it is an adapter on another model")
    files = weight_files(source)
    if files is None:
        raise NotSliceableError("it has no safetensors files")
    return files


def _stored_names(model: PreTrainedModel, files: WeightFiles) -> dict[str, str | None]:
    """Names in the files, by name in the model; None for a weight that is not in the files."""
    held = _translated(model, files)
    if unused := sorted(files.file_of.keys() - set(held.values())):
        logger.info("%d stored weights are not part of the model, the first is %s", len(unused), unused[0])
    stored: dict[str, str | None] = {}
    for name, tensor in weights_of(model):
        # A weight that layers share may be stored under any of its names. If it is under several, the values must be
        # equal, because only one of them is read.
        where = [held[alias] for alias in _aliases(model, name) if alias in held]
        stored[name] = where[0] if where else None
        for one in where:
            if files.shape(one) != tensor.shape:
                raise NotSliceableError(f"{one} has shape {list(files.shape(one))}, not {list(tensor.shape)}")
        if not all(_same(files, where[0], other) for other in where[1:]):
            raise NotSliceableError(f"{' and '.join(where)} should be equal, but differ")
    return stored


def _translated(model: PreTrainedModel, files: WeightFiles) -> dict[str, str]:
    """Names in the files, by name in the model, as transformers translates them when it loads."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = model.state_dict()
    held: dict[str, str] = {}
    for stored in files.file_of:
        name, converter = rename_source_key(stored, renamings, converters, model.base_model_prefix, known)
        # A name that is one of the model's already stays, if the rules would turn it into an unknown one.
        if name not in known and stored in known:
            name, converter = stored, None
        if name in known and converter is not None:
            raise NotSliceableError(f"transformers changes the layout of {stored}")
        if name in held:
            raise NotSliceableError(f"{held[name]} and {stored} are both {name}")
        if name in known:
            held[name] = stored
    return held


def _aliases(model: PreTrainedModel, name: str) -> list[str]:
    """The names of a weight that several layers share, `name` first."""
    tied: Mapping[str, str] = model.all_tied_weights_keys
    first = tied.get(name, name)
    return list(dict.fromkeys([name, first, *(other for other, source in tied.items() if source == first)]))


def _same(files: WeightFiles, one: str, other: str) -> bool:
    """Whether two stored weights of one shape are equal, read part by part."""
    shape = files.shape(one)
    rows = max(1, COMPARED_VALUES // max(1, shape[1:].numel()))
    parts = [(slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows)]
    return all(torch.equal(files.read(one, part), files.read(other, part)) for part in parts)


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
    if shards is None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield from [whole.detach()] if is_main_rank() else []
        return
    for places in _batches(shards):
        if is_main_rank():
            yield from _received(shards, places)
        else:
            _send(shards, places)


def _batches(shards: RowShards) -> Iterator[list[int]]:
    """The places whose shards are sent together, in the order of the rows; every rank finds the same ones.

    A batch has at most BATCH_BYTES, or one shard that is larger.
    """
    row_bytes = shards.tensor.dtype.itemsize * shards.tensor.shape[1:].numel()
    batch: list[int] = []
    size = 0
    for place, rank in enumerate(shards.ranks):
        rows = shards.rows_at(place)
        # The main rank's own shards are not sent, so they take no room in a batch.
        num_bytes = 0 if rank == MAIN_RANK else (rows.stop - rows.start) * row_bytes
        if batch and size + num_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += num_bytes
    yield batch


def _received(shards: RowShards, places: Sequence[int]) -> list[torch.Tensor]:
    """The shards at these places, in the order of the rows."""
    own = local(shards.tensor)
    parts, receiving = [], []
    for place in places:
        rows, rank = shards.rows_at(place), shards.ranks[place]
        if rank == MAIN_RANK:
            parts.append(own)
        elif rows.start < rows.stop:
            parts.append(own.new_empty((rows.stop - rows.start, *shards.tensor.shape[1:])))
            receiving.append(dist.P2POp(dist.irecv, parts[-1], rank, shards.group))
    _exchange(receiving)
    return parts


def _send(shards: RowShards, places: Sequence[int]) -> None:
    """Send this rank's shard if it is among them; the main rank has the shards of its own replica."""
    own = local(shards.tensor)
    if own.numel() and shards.replica == 0 and shards.place in places:
        _exchange([dist.P2POp(dist.isend, own.contiguous(), MAIN_RANK, shards.group)])


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
