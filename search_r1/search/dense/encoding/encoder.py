"""A dense text encoder: a Hugging Face model, pooled, over batches of texts of similar length, for little padding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from search_r1.errors import EncoderError
from search_r1.search.corpus import title_and_text
from search_r1.search.dense.encoding.model import (
    json_reader,
    load_tokenizer,
    load_weights,
    longest_input,
    pack_linear_layers,
    precision_name,
    resolve_device,
    resolve_precision,
    side,
    weights_digest,
)
from search_r1.search.dense.encoding.specification import EncoderSpec, resolve_spec

_LOG = logging.getLogger(__name__)

_CPU_TOKENS, _GPU_TOKENS = 2048, 65_536
_CPU_OVERHEAD, _GPU_OVERHEAD = 64, 2048
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def batch_cost(device: torch.device) -> tuple[int, int]:
    """The best number of tokens for a forward pass on `device`, and the fixed cost of a pass, in tokens."""
    return (_GPU_TOKENS, _GPU_OVERHEAD) if device.type == "cuda" else (_CPU_TOKENS, _CPU_OVERHEAD)


def length_batches(
    lengths: list[int], max_tokens: int, overhead_tokens: int = 0, max_texts: int = sys.maxsize
) -> list[list[int]]:
    """Indices of `lengths`, shortest first, in the cheapest batches of at most `max_texts`.

    A batch costs its padded tokens plus `overhead_tokens`; it has at most `max_tokens` (a longer text is alone).
    """
    # Dynamic programming: for each number of shortest texts the cheapest batches, by the size of the last one.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs = np.zeros(len(order) + 1, dtype=np.int64)  # of the cheapest batches of the first texts
    starts = [0] * len(costs)  # where the last of these batches begins
    for end in range(1, len(costs)):
        length = lengths[order[end - 1]]
        sizes = np.arange(min(end, max_texts, max(1, max_tokens // length)), 0, -1)
        totals = costs[end - len(sizes) : end] + sizes * length
        best = int(totals.argmin())
        costs[end] = totals[best] + overhead_tokens
        starts[end] = end - int(sizes[best])
    # Read the batches off, from the last to the first.
    batches, end = [], len(order)
    while end:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


# One thread per batch, none inside its operations. The operations of a small model are too short to parallelise: waking
# a second thread costs as much as it saves.


class WorkerThreads:
    """`number` threads. A single batch runs in the caller's thread, whose operations may use all cores."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool = ThreadPoolExecutor(number, "encoder", torch.set_num_threads, (1,)) if number > 1 else None

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """The results in the order of `pieces`, which are started in this order, so put the longest first."""
        if self._pool is None or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        return list(self._pool.map(work, pieces))


@dataclass(frozen=True)
class EncoderOptions:
    """`family`: a key of the table of encoder families; `model`: a folder or hub id; `pooling` overrides both.

    `precision`: float32, bfloat16, float16, `auto` or `half` (see `resolve_precision`); `device`: cpu, cuda, cuda:1 or
    auto (a GPU if there is one).
    """

    family: str
    model: str
    pooling: str | None = None
    precision: str = "float32"
    num_threads: int = 1
    device: str = "auto"


class Encoder:
    """Text to float32 vectors of `dim` values. Legend: B texts, L tokens, D = dim.

    The other texts of a call change a vector only by rounding: the tests allow 1e-5 per value in float32 and 0.02 in
    bfloat16, for vectors of length 1.
    """

    def __init__(self, options: EncoderOptions) -> None:
        """Load tokenizer and weights. Raises `EncoderError`."""
        # How to compute, and how the model's files say that a text becomes a vector.
        torch.set_num_threads(options.num_threads)
        self.device = resolve_device(options.device)
        dtype = resolve_precision(options.precision, self.device)
        self.precision = precision_name(dtype)
        self.spec: EncoderSpec = resolve_spec(options.family, json_reader(options.model), options.pooling)
        # The model, its identity, and its limits.
        self._tokenizer = load_tokenizer(options.model)
        model: Any = load_weights(options.model, self.spec.pooling)
        self.side = side(model)
        self.fingerprint = weights_digest(model)
        config: Any = model.config
        self.dim = int(getattr(config, "projection_dim", 0) or config.hidden_size)
        longest = longest_input(model, self._tokenizer, unless_said=512)
        self.longest = min(longest, self.spec.longest or longest)
        self._end: int | None = None
        if self.spec.end_token:  # or the tokenizer's own end of text, where its vocabulary lacks that token
            self._end = self._tokenizer.get_vocab().get(self.spec.end_token, self._tokenizer.eos_token_id)
        # On a CPU every thread encodes batches of its own, with packed weights if they are bfloat16.
        self._model = model.to(self.device, dtype).eval()
        self._threads = WorkerThreads(options.num_threads if self.device.type == "cpu" else 1)
        if pack_linear_layers(self._model):
            self._model.set_attn_implementation("eager")  # for short texts the fastest of a CPU
        _LOG.info("encoder %s on %s in %s: %s", options.model, self.device, self.precision, self.spec)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [B, D]. Raises `EncoderError` on a non-finite vector, or if the model encodes only passages."""
        self._refuse("passage", "queries")
        return self._encode(self._tokens([self.spec.query_prefix + text for text in texts], self.spec.max_query_tokens))

    def encode_passages(self, texts: Sequence[str], max_tokens: int | None = None) -> np.ndarray:
        """float32 [B, D]; each passage is truncated to `max_tokens`.

        Raises as `encode_queries`, and if the model takes at most `longest` tokens, which are fewer.
        """
        self._refuse("query", "passages")
        limit = max_tokens or min(self.spec.max_passage_tokens, self.longest)
        if limit > self.longest:
            raise EncoderError(f"the encoder takes texts of at most {self.longest} tokens, not of {limit}")
        if not self.spec.title_pair:
            return self._encode(self._tokens([self.spec.passage_prefix + text for text in texts], limit))
        pairs = [title_and_text(text) for text in texts]
        return self._encode(self._tokens([title for title, _ in pairs], limit, [text for _, text in pairs]))

    def _refuse(self, side: str, wanted: str) -> None:
        if self.side == side:
            raise EncoderError(
                f"{type(self._model).__name__} cannot encode {wanted}; pass the other encoder of the pair"
            )

    def _tokens(self, texts: list[str], max_tokens: int, second: list[str] | None = None) -> list[list[int]]:
        """Token ids of each text, special tokens included, at least one."""
        if not texts:
            return []
        limit = min(max_tokens, self.longest)
        ids = self._tokenizer(texts, second, max_length=limit, truncation=True)["input_ids"]
        if self._end is not None:
            ids = [row if row[-1:] == [self._end] else [*row[: limit - 1], self._end] for row in ids]
        return [row or [self._tokenizer.pad_token_id] for row in ids]

    def _encode(self, ids: list[list[int]]) -> np.ndarray:
        """The vectors of tokenized texts, float32 [B, D]. Texts of similar length share a batch, for little padding."""
        vectors_BD = np.empty((len(ids), self.dim), dtype=np.float32)
        batches = length_batches([len(row) for row in ids], *batch_cost(self.device))[::-1]
        encoded = self._threads.map(self._encode_batch, [[ids[i] for i in batch] for batch in batches])
        for batch, vectors in zip(batches, encoded, strict=True):
            vectors_BD[batch] = vectors
        return vectors_BD

    @torch.inference_mode()
    def _encode_batch(self, ids: list[list[int]]) -> np.ndarray:
        rows = [torch.tensor(row) for row in ids]
        ids_BL = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id).to(self.device)
        lengths_B1 = torch.tensor([[len(row)] for row in ids], device=self.device)
        mask_BL = (torch.arange(ids_BL.shape[1], device=self.device) < lengths_B1).long()
        vectors_BD = pool(self._model(input_ids=ids_BL, attention_mask=mask_BL), mask_BL, self.spec.pooling)
        if self.spec.normalize:
            vectors_BD = normalize(vectors_BD, dim=-1)
        if not torch.isfinite(vectors_BD).all():
            raise EncoderError("the encoder returned a vector with NaN or Inf; check its weights and its precision")
        return vectors_BD.cpu().numpy()


# Pooling: one vector per text from the hidden states of its tokens.


def pool(output: Any, mask_BL: torch.Tensor, pooling: str) -> torch.Tensor:
    """float32 [B, D] from a model's output; padding is on the right and is ignored."""
    if pooling == "pooler":
        return output.pooler_output.float()
    return _POOLERS[pooling](output.last_hidden_state.float(), mask_BL)


def _mean(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    weight_BL1 = mask_BL.unsqueeze(-1).to(hidden_BLD.dtype)
    return (hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)


def _last(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return hidden_BLD[torch.arange(len(hidden_BLD), device=hidden_BLD.device), mask_BL.sum(1) - 1]


_POOLERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean,
    "max": lambda hidden_BLD, mask_BL: hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, float("-inf")).amax(1),
    "lasttoken": _last,
    "cls": lambda hidden_BLD, mask_BL: hidden_BLD[:, 0],
}
