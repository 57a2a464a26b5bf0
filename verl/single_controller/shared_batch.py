"""A batch in Ray's object store, column by column: written once a step, read by all ranks of a node in place.

A column that several calls or roles need is put there once, for as long as its tensor lives; later columns (advantages,
say) are added alone. Ranks map the memory and copy only the rows of their current micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from verl.engine.batching import RankValues, merge_rows
from verl.protocol import TrainBatch
from verl.single_controller.waiting import put

_columns = WeakTensorKeyDictionary()  # tensor -> its reference in the object store


@dataclass(frozen=True)
class SharedBatch:
    """References to the columns of a `TrainBatch`; small, whatever the size of the batch."""

    lengths: ray.ObjectRef
    tokens: Mapping[str, ray.ObjectRef]
    rows: Mapping[str, ray.ObjectRef]

    def fetch(self) -> TrainBatch:
        """The batch. Its tensors are read-only memory of the object store: writing to one crashes the process."""
        lengths, *columns = ray.get([self.lengths, *self.tokens.values(), *self.rows.values()])
        tensors = [_tensor_of(column) for column in columns]
        num_tokens = len(self.tokens)
        return TrainBatch(
            _tensor_of(lengths),
            dict(zip(self.tokens, tensors[:num_tokens], strict=True)),
            dict(zip(self.rows, tensors[num_tokens:], strict=True)),
        )


def share(batch: TrainBatch, tokens: Collection[str], rows: Collection[str] = ()) -> SharedBatch:
    """Share the named columns, those that the batch has, for ranks to `fetch`; and which rows are one rollout, where
    some have several.
    """
    rows = {*rows, "rollout"} if batch.num_rollouts < len(batch) else rows
    return SharedBatch(
        _put(batch.lengths_B),
        {name: _put(column) for name, column in batch.tokens.items() if name in tokens},
        {name: _put(column) for name, column in batch.rows.items() if name in rows},
    )


@dataclass(frozen=True)
class SharedValues:
    """A rank's `RankValues` as arrays for Ray, which the driver reads in place."""

    rows: list[int]
    tokens: dict[str, np.ndarray]

    @classmethod
    def of(cls, values: RankValues) -> SharedValues:
        return cls(values.rows, {name: value_T.numpy() for name, value_T in values.tokens.items()})


def merged(batch: TrainBatch, answers: Sequence[SharedValues]) -> dict[str, torch.Tensor]:
    """[T, ...] by name, in the batch's order, from the answers of all ranks."""
    return {
        name: merge_rows(batch.lengths_B, [(answer.rows, _tensor_of(answer.tokens[name])) for answer in answers])
        for name in answers[0].tokens
    }


def _put(column: torch.Tensor) -> ray.ObjectRef:
    if column not in _columns:
        _columns[column] = put(column.numpy(), "sharing the batch with the workers")
    return _columns[column]


def _tensor_of(column: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(column)
