"""A cross-encoder: a Hugging Face model that reads a query and a passage together and scores the pair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from search_r1.errors import EncoderError
from search_r1.search.dense.encoding.encoder import WorkerThreads, batch_cost, length_batches
from search_r1.search.dense.encoding.model import (
    json_reader,
    load_cross_encoder,
    load_tokenizer,
    longest_input,
    pack_linear_layers,
    precision_name,
    resolve_device,
    resolve_precision,
    weights_digest,
)
from search_r1.search.dense.encoding.specification import (
    SENTENCE_TRANSFORMERS,
    ReadJson,
    SentenceTransformersConfig,
    read_checked,
)

_LOG = logging.getLogger(__name__)
_HEADS = ("classifier", "score")  # names of the last layers in transformers
_PASSAGE_SHARE = 4  # of the length: a fourth is the passage's, however long the query is


class Pair(NamedTuple):
    """A query and a passage to score."""

    query: str
    passage: str


@dataclass(frozen=True)
class CrossEncoderOptions:
    """`model` is a folder or a hub id; `max_length`: most tokens of a pair; `batch_size`: most pairs of a forward pass.

    `precision` and `device` as in `EncoderOptions`; the last layers are always float32, so that close scores differ.
    """

    model: str
    max_length: int = 512
    batch_size: int = 32
    precision: str = "auto"
    num_threads: int = 1
    device: str = "auto"


class CrossEncoder:
    """Scores pairs: higher is better. Legend: B pairs, L tokens.

    A score is the model's logit, or its sigmoid if the model's files say so. The other pairs of a call change a score
    only by rounding: the tests allow 3e-5 in float32 and 0.1 in bfloat16, for scores that spread by 1.5.
    """

    def __init__(self, options: CrossEncoderOptions) -> None:
        """Load tokenizer and weights. Raises `EncoderError`."""
        # The model, and a number format that is fast on its device.
        torch.set_num_threads(options.num_threads)
        self.name = options.model
        self.device = resolve_device(options.device)
        dtype = resolve_precision(options.precision, self.device)
        self.precision = precision_name(dtype)
        self._tokenizer = load_tokenizer(options.model)
        model = load_cross_encoder(options.model)
        self.fingerprint = weights_digest(model)
        config: Any = model.config
        if config.num_labels != 1:
            raise EncoderError(
                f"{options.model} gives {config.num_labels} scores per pair; pass a cross-encoder that gives one"
            )
        self._activation = _activation(config, json_reader(options.model))
        # The room for a query and its passage, between the special tokens.
        self.max_length = min(options.max_length, longest_input(model, self._tokenizer, options.max_length))
        self._room = self.max_length - self._tokenizer.num_special_tokens_to_add(pair=True)
        if self._room < _PASSAGE_SHARE:
            raise EncoderError(f"{self.max_length} tokens do not hold a query and a passage; raise the maximum length")
        # On a CPU every thread scores batches of its own.
        self._batch_size = options.batch_size
        self._model = _with_exact_head(model.to(self.device, dtype).eval())
        pack_linear_layers(self._model)
        self._threads = WorkerThreads(options.num_threads if self.device.type == "cpu" else 1)
        _LOG.info("cross-encoder %s on %s in %s, %d tokens", self.name, self.device, self.precision, self.max_length)

    def score(self, pairs: Sequence[Pair]) -> np.ndarray:
        """float64 [B]; the caller must check that scores are finite.

        In a pair longer than `max_length`, the passage is truncated; the query, too, if it would leave the passage less
        than a fourth of the tokens.
        """
        scores_B = np.empty(len(pairs))
        if not pairs:
            return scores_B
        tokens = self._tokens(pairs)
        lengths = [len(row) for row in tokens["input_ids"]]
        batches = length_batches(lengths, *batch_cost(self.device), self._batch_size)[::-1]
        parts = [{name: [rows[i] for i in batch] for name, rows in tokens.items()} for batch in batches]
        for batch, scores in zip(batches, self._threads.map(self._score_batch, parts), strict=True):
            scores_B[batch] = scores
        return scores_B

    def _tokens(self, pairs: Sequence[Pair]) -> dict[str, list[list[int]]]:
        """`input_ids`, and `token_type_ids` where the model has them; special tokens included."""
        queries = self._cut({pair.query for pair in pairs}, self._room - self._room // _PASSAGE_SHARE)
        tokens = self._tokenizer(
            [queries[pair.query] for pair in pairs],
            [pair.passage for pair in pairs],
            max_length=self.max_length,
            truncation="only_second",
            return_attention_mask=False,
        )
        return dict(tokens)

    def _cut(self, texts: set[str], max_tokens: int) -> dict[str, str]:
        """The texts, by themselves, each cut where its token number `max_tokens` ends."""
        ordered = sorted(texts)
        spans = self._tokenizer(
            ordered, add_special_tokens=False, return_offsets_mapping=True, max_length=max_tokens, truncation=True
        )["offset_mapping"]
        cut = {}
        for text, offsets in zip(ordered, spans, strict=True):
            cut[text] = text[: offsets[-1][1]] if len(offsets) == max_tokens else text
        return cut

    @torch.inference_mode()
    def _score_batch(self, tokens: dict[str, list[list[int]]]) -> np.ndarray:
        pads = {"input_ids": self._tokenizer.pad_token_id, "token_type_ids": self._tokenizer.pad_token_type_id}
        tensors = {
            name: pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pads[name])
            for name, rows in tokens.items()
        }
        lengths_B1 = torch.tensor([[len(row)] for row in tokens["input_ids"]])
        tensors["attention_mask"] = (torch.arange(tensors["input_ids"].shape[1]) < lengths_B1).long()
        logits_B = self._model(**{name: tensor.to(self.device) for name, tensor in tensors.items()}).logits[:, 0]
        return self._activation(logits_B.double()).cpu().numpy()


def _activation(config: Any, read_json: ReadJson) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of a logit that the files of sentence-transformers ask for; by default the logit itself.

    The file of its own is the newest of the three places where they may say so.
    """
    own = read_checked(read_json, SENTENCE_TRANSFORMERS, SentenceTransformersConfig)
    nested = getattr(config, "sentence_transformers", None) or {}
    old = getattr(config, "sbert_ce_default_activation_function", None)
    name = (own and own.activation_fn) or nested.get("activation_fn") or old or "Identity"
    known = {"Identity": lambda logits: logits, "Sigmoid": torch.sigmoid}
    kind = name.rpartition(".")[2]
    if kind not in known:
        raise EncoderError(f"the model asks for the activation {name}; supported are {', '.join(known)}")
    return known[kind]


def _with_exact_head(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its last layers in float32: a half-precision logit has steps of up to 1/16 where scores matter."""
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Module):
            head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
    return model
