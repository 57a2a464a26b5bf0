"""A dense text encoder: a Hugging Face model, pooled. The only module of the service that imports torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

from search_r1.search.encoder_spec import EncoderSpec, resolve_spec
from search_r1.search.errors import EncoderError

_LOG = logging.getLogger(__name__)
_CPU_BATCH, _GPU_BATCH = 32, 512


@dataclass(frozen=True)
class EncoderOptions:
    """`family` names a row of the table of encoders; `model` is a folder or a hub id; `pooling` overrides.

    Weights are float32 unless `half` on a GPU.
    """

    family: str
    model: str
    pooling: str | None = None
    half: bool = False
    num_threads: int = 1


class Encoder:
    """Text to float32 vectors of `dim` values. Legend: B texts, L tokens, D = dim."""

    def __init__(self, options: EncoderOptions) -> None:
        """Load tokenizer and weights. Raises `EncoderError`."""
        torch.set_num_threads(options.num_threads)
        self.spec: EncoderSpec = resolve_spec(options.family, _json_reader(options.model), options.pooling)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer, model = _load(options.model)
        self.fingerprint = _fingerprint(model)
        self.dim = int(model.config.hidden_size)
        self._longest = min(self._tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
        half = options.half and self.device.type == "cuda"
        self._model = model.to(self.device, torch.float16 if half else torch.float32).eval()
        _LOG.info("encoder %s on %s: %s", options.model, self.device, self.spec)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [B, D]. Raises `EncoderError` on a non-finite vector."""
        return self._encode(self.spec.query_prefix, texts, self.spec.max_query_tokens)

    def encode_passages(self, texts: Sequence[str], max_tokens: int | None = None) -> np.ndarray:
        """float32 [B, D]; each passage cut to `max_tokens`. Raises `EncoderError` on a non-finite vector."""
        limit = self.spec.max_passage_tokens
        return self._encode(self.spec.passage_prefix, texts, min(max_tokens or limit, limit))

    def _encode(self, prefix: str, texts: Sequence[str], max_tokens: int) -> np.ndarray:
        """Texts of like length share a batch: padding is work for nothing."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        size = _GPU_BATCH if self.device.type == "cuda" else _CPU_BATCH
        vectors_BD = np.empty((len(texts), self.dim), dtype=np.float32)
        for start in range(0, len(texts), size):
            batch = order[start : start + size]
            vectors_BD[batch] = self._encode_batch([prefix + texts[i] for i in batch], max_tokens)
        return vectors_BD

    @torch.inference_mode()
    def _encode_batch(self, texts: list[str], max_tokens: int) -> np.ndarray:
        inputs = self._tokenizer(
            texts,
            max_length=min(max_tokens, self._longest),
            truncation=True,
            padding=True,
            return_tensors="pt",
        ).to(self.device)
        output = self._model(**inputs)
        vectors_BD = pool(output, inputs["attention_mask"], self.spec.pooling).float()
        if self.spec.normalize:
            vectors_BD = normalize(vectors_BD, dim=-1)
        if not torch.isfinite(vectors_BD).all():
            raise EncoderError("the encoder gave a vector with NaN or Inf; its weights or its precision are unfit")
        return vectors_BD.cpu().numpy()


def pool(output: Any, mask_BL: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector [B, D] a text from `output.last_hidden_state` [B, L, D]; padding is on the right and never counts."""
    if pooling == "pooler":
        return output.pooler_output
    return _POOLERS[pooling](output.last_hidden_state, mask_BL)


def _mean(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    weight_BL1 = mask_BL.unsqueeze(-1).to(hidden_BLD.dtype)
    return (hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)


def _max(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _last(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return hidden_BLD[torch.arange(len(hidden_BLD), device=hidden_BLD.device), mask_BL.sum(1) - 1]


_POOLERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean,
    "max": _max,
    "lasttoken": _last,
    "cls": lambda hidden_BLD, mask_BL: hidden_BLD[:, 0],
}


def _load(model: str) -> tuple[Any, Any]:
    """Tokenizer (padding on the right) and float32 model; remote code is never run."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right", use_fast=True)
        loaded = AutoModel.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(
            f"cannot load the encoder {model}: {str(error).splitlines()[0]}; "
            "pass a model folder, or a hub id that can be downloaded"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, loaded


def _json_reader(model: str) -> Callable[[str], Any]:
    """Reads a JSON file of the model, in its folder or from the hub's cache; None when the model has no such file."""

    def read(name: str) -> Any:
        subfolder, _, filename = name.rpartition("/")
        try:
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
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    return read


def _fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the names and values of all parameters and buffers, before any change of precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
