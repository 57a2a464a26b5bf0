"""A model's adapters on disk, in the format that `peft.PeftModel.from_pretrained` reads.

The files also hold whatever else is trained: a critic's output layer (`modules_to_save`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl.engine.files.streaming import Entry, write_safetensors
from verl.engine.files.weight_files import WeightFiles
from verl.engine.lora import adapted_layers, is_adapter
from verl.engine.model import Decoder
from verl.errors import CheckpointError

FOLDER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
