"""What the trainer knew about each token, as optional columns of the store after those of `SCHEMA`.

    advantages      of each policy token, as it entered the loss, before any tokens were excluded
    old_log_probs   under the trainer's policy before the update; `log_probs` are the sampler's
    kl              to the anchor, by the estimator of the run, before its coefficient

A column exists if the run computed it. Its list is null for a trajectory that was not trained on, and a number in the
list is null where nothing was computed: at prompt and environment tokens, and at tokens excluded from the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_LIST = pa.list_(pa.float32())


@dataclass(frozen=True)
class TokenValues:
    """`rows`: indices of the trajectories that have values; `lengths_B`: their lengths in tokens. `columns`: by name,
    the values and whether each one is known, both [T] over these trajectories in this order."""

    rows: Sequence[int]
    lengths_B: npt.NDArray[np.int64]
    columns: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]


def with_token_values(table: pa.Table, values: TokenValues) -> pa.Table:
    """`table` of trajectories with one more column for each of `values`."""
    order = np.argsort(np.array(values.rows, np.int64), kind="stable")
    there_R = np.zeros(len(table), np.bool_)
    there_R[list(values.rows)] = True
    lengths_R = np.zeros(len(table), np.int64)
    lengths_R[list(values.rows)] = values.lengths_B
    offsets = pa.array(np.concatenate([[0], lengths_R.cumsum()]).astype(np.int32))
    ends_B = values.lengths_B.cumsum()
    for name, (value_T, known_T) in values.columns.items():
        sorted_T, known_sorted_T = (_reordered(column_T, ends_B, order) for column_T in (value_T, known_T))
        numbers = pa.array(sorted_T.astype(np.float32), mask=~known_sorted_T)
        column = pa.ListArray.from_arrays(offsets, numbers, type=_LIST, mask=pa.array(~there_R))
        table = table.append_column(pa.field(name, _LIST), column)
    return table


def _reordered(
    column_T: npt.NDArray[Any], ends_B: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    pieces = np.split(column_T, ends_B[:-1])
    return np.concatenate([pieces[row] for row in order]) if len(order) else column_T
