"""Which base model the adapters belong to: its path, for people, and a checksum of its weights, for comparison."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from verl.engine.device.sharding import local, own_values
from verl.engine.files.checksum import MODULUS, word_sum
from verl.engine.lora import adapted_layers
from verl.engine.model import Decoder
from verl.errors import CheckpointError
from verl.process.storage import sync

FILE = "base.json"


class BaseWeights:
    """The frozen weights of `model`, which has adapters. They never change, so the checksum is computed once."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._checksum: int | None = None

    @classmethod
    def of(cls, model: torch.nn.Module) -> BaseWeights | None:
        """The base weights of `model`; None if it has no adapters."""
        return cls(model) if isinstance(model, Decoder) and any(adapted_layers(model)) else None

    def checksum(self) -> int:
        """Of all frozen parameters, in their number format. A collective."""
        if self._checksum is None:
            frozen = ((name, tensor) for name, tensor in self._model.named_parameters() if not tensor.requires_grad)
            own = sum((2 * zlib.crc32(name.encode()) + 1) * _own_sum(tensor) for name, tensor in frozen) % MODULUS
            parts: list[int] = [own] * dist.get_world_size()
            dist.all_gather_object(parts, own)
            self._checksum = sum(parts) % MODULUS
        return self._checksum

    def write(self, folder: Path) -> Path:
        """Write the file and return its path. Call it on one rank, after `checksum`."""
        file = folder / FILE
        file.write_text(json.dumps({"path": self._path, "checksum": f"{self.checksum():016x}"}, indent=2) + "\n")
        sync(file)
        return file

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless the adapters in `folder` were trained on these weights. A collective."""
        mine = f"{self.checksum():016x}"
        if not (folder / FILE).is_file():
            raise CheckpointError(
                f"it has no {FILE}, because that run trained all weights: set lora_rank=0, or start a new run"
            )
        saved = json.loads((folder / FILE).read_text())
        if saved["checksum"] != mine:
            raise CheckpointError(
                f"its adapters were trained on the weights of {saved['path']} (checksum {saved['checksum']}), but "
                f"{self._path} has different weights ({mine}): restore the model's path, override_config and "
                "mixed_precision.param_dtype"
            )

    @property
    def _path(self) -> str:
        return str(self._model.model.name_or_path)


def _own_sum(tensor: torch.Tensor) -> int:
    own = own_values(tensor)
    values = local(tensor).reshape(-1)[: own.stop - own.start]
    return word_sum(values, own.start * tensor.itemsize)
