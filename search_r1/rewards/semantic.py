"""Semantic similarity: the cosine between sentence embeddings of the policy's answer and of the gold answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from search_r1.errors import EncoderError
from search_r1.rewards.component import Value, component
from search_r1.rewards.reading import Reading
from search_r1.search.dense.encoding.specification import resolve_spec
from verl.errors import ConfigError

if TYPE_CHECKING:
    from search_r1.search.dense.encoding.encoder import Encoder

_loading = threading.Lock()
_encoders: dict[tuple[str, str, str], Encoder] = {}  # of this process


@component("semantic")
class Semantic:
    """max over gold answers of cosine(answer, gold), with a negative cosine counted as 0; 0 without an answer.

    The comparison is symmetric: both texts are encoded with the encoder's query prefix.
    """

    def __init__(self, model: str, family: str = "minilm", device: str = "cpu") -> None:
        """`model`: folder or hub id of an encoder, pooled and normalised as its sentence-transformers files say.

        `family` is a key of the table of encoder families, for what these files do not say: `minilm` uses mean pooling
        and no prefix. The weights are loaded at first use. Raises `ConfigError` if the model does not exist.
        """
        import torch

        from search_r1.search.dense.encoding.model import json_reader, resolve_device

        # Everything that can be checked without loading the weights.
        self._options = (model, family, device)
        try:
            read_json = json_reader(model)
            if read_json("config.json") is None:
                raise EncoderError(
                    f"no config.json of {model}: give a model folder, or a hub id that can be downloaded"
                )
            resolve_spec(family, read_json)
            if resolve_device(device).type == "cuda" and not torch.cuda.is_available():
                raise EncoderError(f"device={device}, but torch sees no GPU: use cpu or auto")
        except (EncoderError, RuntimeError) as error:  # torch's own for a device of no kind
            raise _unfit(error) from error

    async def check(self) -> None:
        """Load the encoder. Raises `ConfigError`."""
        await asyncio.to_thread(self._cosines, [("a", "b")])

    async def measure(self, readings: Sequence[Reading]) -> list[Value]:
        """The similarities, in the order of `readings`. Raises `ConfigError` for an encoder that cannot be used."""
        pairs = [pair for reading in readings for pair in _pairs(reading)]
        cosines = dict(zip(pairs, await asyncio.to_thread(self._cosines, pairs), strict=True))
        return [max([0.0, *(cosines[pair] for pair in _pairs(reading))]) for reading in readings]

    def _cosines(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The cosine of each pair of texts; 0 if a vector has length 0. Each text is encoded once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        if not texts:
            return []
        try:
            vectors_BD = _encoder(*self._options).encode_queries(texts).astype(np.float64)
        except EncoderError as error:
            raise _unfit(error) from error
        lengths_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
        unit_BD = vectors_BD / np.maximum(lengths_B1, np.finfo(np.float64).tiny)
        units = dict(zip(texts, unit_BD, strict=True))
        return [min(1.0, float(units[answer] @ units[gold])) for answer, gold in pairs]


def _pairs(reading: Reading) -> list[tuple[str, str]]:
    """The pairs (answer, gold answer) in which neither is blank."""
    answer = (reading.answer or "").strip()
    golds = [gold.strip() for gold in reading.targets]
    return [(answer, gold) for gold in golds if gold and answer]


def _encoder(model: str, family: str, device: str) -> Encoder:
    """The encoder of these options, loaded once a process, with the threads that torch has."""
    import torch

    from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions

    with _loading:
        if (model, family, device) not in _encoders:
            options = EncoderOptions(family, model, num_threads=torch.get_num_threads(), device=device)
            _encoders[model, family, device] = Encoder(options)
        return _encoders[model, family, device]


def _unfit(error: Exception) -> ConfigError:
    return ConfigError(f"reward component semantic: {error}")
