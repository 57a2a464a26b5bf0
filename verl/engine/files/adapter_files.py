"""A model's adapters on disk, in the format that `peft.PeftModel.from_pretrained` reads.

The files also hold whatever else is trained: a critic's output layer (`modules_to_save`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.engine.device.sharding import local, own_values
from verl.engine.files.checksum import MODULUS, word_sum
from verl.engine.files.slices import Entry, write_safetensors
from verl.engine.files.weight_files import WeightFiles
from verl.engine.lora import adapted_layers, is_adapter
from verl.engine.model import Decoder
from verl.errors import CheckpointError
from verl.process.storage import sync

FOLDER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE = "base.json"


def adapter_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """All trained tensors, still sharded, under peft's names; {} for a model without adapters."""
    if not any(adapted_layers(model)):
        return {}
    trained = ((name, tensor) for name, tensor in model.model.named_parameters() if tensor.requires_grad)
    return {
        f"base_model.model.{name}.weight" if is_adapter(name) else f"base_model.model.{name}": t for name, t in trained
    }


def write_adapter(folder: Path, model: Decoder, parts: Iterator[torch.Tensor]) -> None:
    """Write the adapters, if any, to `folder/adapter`; their values come next in `parts`, in order."""
    tensors = adapter_tensors(model)
    if not tensors:
        return
    target = folder / FOLDER
    target.mkdir()
    entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_safetensors(target / WEIGHTS, entries, parts)
    (target / CONFIG).write_text(json.dumps(adapter_config(model), indent=2) + "\n")


def adapter_config(model: Decoder) -> dict[str, Any]:
    """peft's configuration. It names layers in full, so that no other layer of the base model matches."""
    layers = dict(adapted_layers(model.model))
    lora = next(iter(layers.values())).lora
    # Trained layers without an adapter, such as a critic's output layer, are saved as a whole.
    trained = [name for name, tensor in model.model.named_parameters() if tensor.requires_grad]
    others = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.model.can_generate() else "TOKEN_CLS",
        "base_model_name_or_path": model.model.name_or_path or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(layers),
        "modules_to_save": others or None,
        "inference_mode": True,
    }


def adapter_weights(path: Path) -> WeightFiles:
    """The adapter weights in a folder that `write_adapter` wrote to. Raises CheckpointError."""
    file = path / FOLDER / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} has no {FOLDER}/{WEIGHTS}: it was saved by a run without adapters (lora_rank)")
    return WeightFiles.of(file)


# The base model that the adapters belong to: its path, for people, and a checksum of its weights, for comparison.


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
        """The checksum of all frozen parameters, in their number format. A collective."""
        if self._checksum is not None:
            return self._checksum
        # Each value belongs to one rank, so the ranks' sums add up to that of the whole weights.
        own = 0
        for name, tensor in self._model.named_parameters():
            if not tensor.requires_grad:
                span = own_values(tensor)
                values = local(tensor).reshape(-1)[: span.stop - span.start]
                factor = 2 * zlib.crc32(name.encode()) + 1  # so that weights that changed places change the sum
                own += factor * word_sum(values, span.start * tensor.itemsize)
        parts: list[int] = [own % MODULUS] * dist.get_world_size()
        dist.all_gather_object(parts, own % MODULUS)
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
