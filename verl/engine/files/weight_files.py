"""The safetensors files of a model: which weights they hold, and parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from verl.errors import CheckpointError


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model; `file_of` says which one holds a weight, by its name in the files."""

    file_of: Mapping[str, Path]

    @classmethod
    def of(cls, file: Path) -> WeightFiles:
        """All weights of one file. Raises CheckpointError when it cannot be read."""
        with _opened(file, "names") as opened:
            return cls(dict.fromkeys(opened.keys(), file))

    def shape(self, name: str) -> torch.Size:
        """Shape of a weight. Raises CheckpointError when the file cannot be read."""
        with _opened(self.file_of[name], name) as source:
            return torch.Size(source.get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of the part at `index`, in the file's number format. Raises CheckpointError when it cannot be read.

        The file is opened for this one weight: as long as a mapped file is open, all that was read from it counts as
        memory of the process.
        """
        with _opened(self.file_of[name], name) as source:
            part = source.get_slice(name)[index or ...]
            return torch.empty_like(part).copy_(part)


def weight_files(source: str | Path) -> WeightFiles | None:
    """The files of a folder or hub name (downloaded if need be); None if there are no safetensors files.

    Raises CheckpointError when a file is absent or damaged.
    """
    single = _found(source, SAFE_WEIGHTS_NAME)
    if single is not None:
        return WeightFiles.of(single)
    index = _found(source, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return None
    try:
        # The index has plain file names; the files of a hub name are in the hub's cache.
        files, metadata = get_checkpoint_shard_files(str(source), str(index))
        by_name = {Path(file).name: Path(file) for file in files}
        return WeightFiles({name: by_name[Path(file).name] for name, file in metadata["weight_map"].items()})
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{index} cannot be used: {error}") from error


def _found(source: str | Path, file: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() or path.is_symlink() else None  # a link to nothing is told, not passed over
    try:
        return Path(cached_file(str(source), file))
    except OSError:  # what is not on the hub, or cannot be reached there
        return None


@contextlib.contextmanager
def _opened(file: Path, wanted: str) -> Iterator[Any]:
    try:
        file.open("rb").close()  # says why a file cannot be read: safetensors says only that it is not there
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {wanted} cannot be read: {error}") from error
