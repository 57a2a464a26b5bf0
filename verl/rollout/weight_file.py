"""Weights on their way from the trainer to the sampler: one safetensors file in shared memory, with a checksum.

Needs torch and safetensors only, so that the training side can publish without importing an inference engine.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from verl.errors import NumericalError, WeightSyncError
from verl.rollout.owned_folder import OwnedFolder

SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # only the parent: a private folder is made in it
FOLDER_PREFIX = "verl-weights-"
FILE_PATTERN = "weights-*.safetensors"

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class WeightHandle:
    """Where published weights are, which version they are, and the `checksum` of their tensors."""

    path: str
    version: int
    checksum: str


def weight_folder(parent: Path = SHARED_MEMORY) -> OwnedFolder:
    """A folder to publish in, in shared memory where there is one: what is left in it takes memory."""
    return OwnedFolder(FOLDER_PREFIX, parent if os.access(parent, os.W_OK) else None)


def crc(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes, computed on the CPU."""
    return zlib.crc32(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)


def checksum(named_tensors: NamedTensors, of_values: Callable[[torch.Tensor], int] = crc) -> str:
    """A digest of names, dtypes, shapes and `of_values` of the tensors, whatever order they come in."""
    lines = sorted(f"{name} {tensor.dtype} {list(tensor.shape)} {of_values(tensor)}" for name, tensor in named_tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise `NumericalError` for a NaN or an Inf."""
    if not torch.isfinite(tensor).all():
        raise NumericalError(f"weight {name} has NaN or Inf values; it is not given to the sampler")


def publish_weights(named_tensors: NamedTensors, version: int, directory: str | os.PathLike[str]) -> WeightHandle:
    """Write the tensors to `directory` (best in shared memory), replacing what was published there before.

    Names are those of the Hugging Face checkpoint. Raises `NumericalError` naming the first tensor that has a NaN or
    an Inf: a sampler would turn it into nonsense text.
    """
    tensors = {name: _on_cpu(name, tensor) for name, tensor in named_tensors}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"weights-{version}.safetensors"
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    unfinished.replace(path)
    for old in folder.glob(FILE_PATTERN):
        if old != path:
            old.unlink(missing_ok=True)
    return WeightHandle(str(path), version, checksum(tensors.items()))


def read_weights(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a published file, on the CPU, one at a time. Raises `WeightSyncError` when it cannot be read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict: it cannot be iterated itself)
                yield name, file.get_tensor(name)
    except OSError as error:
        raise WeightSyncError(f"published weights {path} cannot be read: {error}") from error


def _on_cpu(name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    check_finite(name, tensor)
    return tensor.to("cpu").contiguous()
