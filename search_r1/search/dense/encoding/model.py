"""Tokenizer and weights of an encoder or a cross-encoder, from a folder or a hub id, on a device and in a number format
that is fast there. Remote code is never run.

On a CPU in bfloat16, linear layers have their weights packed for oneDNN. `torch.nn.Linear` repacks its weight in every
call, which for the few hundred tokens of a batch of queries costs as much as the product. Here it is packed once, and
the GELU after a layer is applied while the product is still in the cache, before it is rounded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.activations import GELUActivation
from transformers.utils import cached_file

from search_r1.errors import EncoderError

_LOG = logging.getLogger(__name__)
_SIDES = {"DPRQuestionEncoder": "query", "DPRContextEncoder": "passage"}


def load_tokenizer(model: str) -> Any:
    """A tokenizer with a padding token. Raises `EncoderError`."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, use_fast=True, trust_remote_code=False)
    except Exception as error:  # the library tokenizers has no other class for what is wrong with its files
        raise _cannot_load(model, error) from error
    # Where the files are missing, transformers makes a tokenizer to which every word is unknown, and says nothing.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        raise EncoderError(
            f"the model {model} has no vocabulary: all words would be one; add its tokenizer's files (tokenizer.json, "
            "tokenizer_config.json) to its folder"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_weights(model: str, pooling: str) -> torch.nn.Module:
    """The float32 encoder; the checkpoint must have all its weights. Raises `EncoderError`."""

    def architecture(config: Any) -> Any:
        # The automatic choice takes the question encoder for every DPR checkpoint and leaves its weights random.
        named = (config.architectures or [""])[0]
        return getattr(transformers, named) if named in _SIDES else AutoModel

    loaded, missing = _load(model, architecture)
    if pooling != "pooler":
        missing = [name for name in missing if not name.startswith("pooler.")]
    _refuse_missing(model, loaded, missing, "pass a complete checkpoint, or another pooling")
    return loaded


def load_cross_encoder(model: str) -> torch.nn.Module:
    """The float32 model with its classifier; the checkpoint must have all its weights. Raises `EncoderError`."""
    loaded, missing = _load(model, lambda _: AutoModelForSequenceClassification)
    _refuse_missing(model, loaded, missing, "pass a cross-encoder, such as cross-encoder/ms-marco-MiniLM-L12-v2")
    return loaded


def longest_input(model: torch.nn.Module, tokenizer: Any, unless_said: int) -> int:
    """The most tokens of a text, special ones included, that the model and its tokenizer take. `unless_said`: what a
    model takes whose config has no number of positions.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or unless_said
    # RoBERTa and its like number the tokens of a text from behind the id of the padding token on.
    for name, layer in model.named_modules():
        if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            positions = min(positions, layer.num_embeddings - layer.padding_idx - 1)
    return min(positions, tokenizer.model_max_length)


def side(model: torch.nn.Module) -> str | None:
    """`query` or `passage` if the model encodes only those (DPR), else None."""
    return _SIDES.get(type(model).__name__)


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over the names and values of all parameters and buffers, before any change of precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def json_reader(model: str) -> Callable[[str], Any]:
    """A function that reads a JSON file of the model, from its folder or the hub's cache; None if there is none."""

    def read(name: str) -> Any:
        subfolder, _, filename = name.rpartition("/")
        try:
            # A model may lack the file, and a hub may be out of reach: with these settings, both give None.
            path = cached_file(
                model,
                filename,
                subfolder=subfolder,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except (OSError, ValueError) as error:
            raise EncoderError(f"cannot find the encoder {model}: {str(error).splitlines()[0]}") from error
        if path is None or not os.path.isfile(path):
            return None
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError) as error:
            raise EncoderError(f"{path} cannot be read: {error}; fetch the encoder's files again") from error

    return read


def _load(model: str, choose: Callable[[Any], Any]) -> tuple[torch.nn.Module, list[str]]:
    """The model of the class that `choose(config)` gives, and the names of the weights that the checkpoint lacks."""
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        loaded, report = _from_pretrained(choose(config), model)
    except EncoderError:
        raise
    except Exception as error:  # of transformers, safetensors or PyTorch, for weights that are damaged or none at all
        raise _cannot_load(model, error) from error
    if config.is_encoder_decoder:
        raise EncoderError(f"{model} is an encoder-decoder model ({config.model_type}), which is not supported")
    return loaded, sorted(report["missing_keys"])


def _refuse_missing(model: str, loaded: torch.nn.Module, missing: list[str], advice: str) -> None:
    if missing:
        raise EncoderError(
            f"the checkpoint {model} lacks {len(missing)} weights of {type(loaded).__name__} ({missing[0]}, ...): they "
            f"would be random; {advice}"
        )


def _from_pretrained(architecture: Any, model: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model from its safetensors file, or with a warning from a PyTorch file, of which only tensors are read."""
    options = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    try:
        return architecture.from_pretrained(model, use_safetensors=True, **options)
    except OSError:
        # To the library, a file that this user may not read is missing.
        hidden = [file for file in Path(model).glob("*.safetensors") if not os.access(file, os.R_OK)]
        if hidden:
            raise EncoderError(f"{hidden[0]} cannot be read: let this user read it, or fetch it again") from None
        loaded = architecture.from_pretrained(model, use_safetensors=False, weights_only=True, **options)
        _LOG.warning("%s has no safetensors file; its PyTorch file was read", model)
        return loaded


def _cannot_load(model: str, error: Exception) -> EncoderError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, SafetensorError):
        return EncoderError(f"the weights of {model} are damaged, or not whole ({reason}); fetch its files again")
    if type(error).__name__ == "UnpicklingError":  # of PyTorch, whose advice is to run whatever the file holds
        reason = "its PyTorch file has something else than tensors"
    return EncoderError(
        f"cannot load the model {model}: {reason}; pass a model folder, or a hub id that can be downloaded"
    )


PRECISIONS = ("auto", "half", "float32", "bfloat16", "float16")
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; emulated, it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _CPU_BF16)


def resolve_device(requested: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU if there is one."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested)


def resolve_precision(requested: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 if the hardware supports it, else float16 on a GPU and float32 on a CPU.

    `half` is the published `--use_fp16`: float16 on a GPU, as `auto` on a CPU. Raises `EncoderError` for an unknown
    name, and for float16 on a CPU, which no CPU computes fast.
    """
    if requested not in PRECISIONS:
        raise EncoderError(f"precision {requested!r} is not one of {', '.join(PRECISIONS)}")
    on_gpu = device.type == "cuda"
    if requested == "float16" and not on_gpu:
        raise EncoderError("precision float16 needs a GPU; use auto, bfloat16 or float32 on a CPU")
    if requested == "half":
        requested = "float16" if on_gpu else "auto"
    if requested != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[requested]
    # By default, PyTorch also says yes for older GPUs, which only emulate bfloat16.
    if on_gpu:
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def precision_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16` or `float16`."""
    return str(dtype).removeprefix("torch.")


class PackedLinear(torch.nn.Module):
    """x W^T + b, then GELU if requested, for bfloat16 [..., in_features] on a CPU. For inference only."""

    def __init__(self, linear: torch.nn.Linear, activation: Literal["none", "gelu"] = "none") -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """bfloat16 [..., out_features]."""
        kind = "none" if self._activation == "gelu" else ""  # of the GELU: the exact one, not that by tanh
        return torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, self._activation, [], kind)  # type: ignore[no-any-return]


@torch.inference_mode()
def pack_linear_layers(model: torch.nn.Module) -> bool:
    """Replace every bfloat16 linear layer on a CPU, and the exact GELU that follows one in the blocks of BERT.

    Returns whether any layer was replaced: none on a CPU that is too old for oneDNN's bfloat16 (without AVX-512 and
    AVX-NE-CONVERT), where PyTorch's own layers compute.
    """
    found = False
    for name, child in list(model.named_children()):
        if (
            type(child) is torch.nn.Linear
            and child.weight.device.type == "cpu"
            and child.weight.dtype == torch.bfloat16
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            # BERT's block applies `intermediate_act_fn` to what its `dense` gives: one packed layer does both.
            fused = name == "dense" and isinstance(getattr(model, "intermediate_act_fn", None), GELUActivation)
            setattr(model, name, PackedLinear(child, "gelu" if fused else "none"))
            if fused:
                model.intermediate_act_fn = torch.nn.Identity()
            found = True
        else:
            found |= pack_linear_layers(child)
    return found
