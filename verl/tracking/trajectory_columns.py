"""Trajectories as the columns of the store. Letters: `B` rows, `T` tokens of all rows, concatenated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from verl.agent.text import whole_characters
from verl.protocol import Segment, Source, Trajectory, flat_tokens, was_search
from verl.tracking.trajectory_rows import SCHEMA, question_of

Decode = Callable[[list[int]], str]

_Text = Callable[[tuple[int, ...]], str]
_TOKEN_COLUMNS = ("ids", "loss_mask", "log_probs")
_REMEMBERED = 32  # texts: the prompt of a group is decoded once, and a response of one segment
_LIST = pa.list_(pa.float32())


def to_table(trajectories: Sequence[Trajectory], step: int, decode: Decode) -> pa.Table:
    """One row per trajectory, with the columns of `SCHEMA`; `decode` turns token ids into text.

    Half a surrogate pair in a text is stored as U+FFFD. Raises ValueError or OverflowError for a value that its column
    cannot hold.
    """
    text = lru_cache(_REMEMBERED)(lambda ids: decode(list(ids)))
    small = pa.schema([field for field in SCHEMA if field.name not in _TOKEN_COLUMNS])
    table = pa.Table.from_pylist([_row(trajectory, step, text) for trajectory in trajectories], schema=small)

    # The columns with a number for each token are made from arrays, without a Python object for each token.
    flat = flat_tokens(trajectories)
    offsets = pa.array(np.concatenate([[0], flat.lengths_B.cumsum()])).cast(pa.int32())
    columns: tuple[npt.NDArray[Any], ...] = (flat.ids_T, flat.loss_mask_T, flat.log_probs_T)
    for name, value_T in zip(_TOKEN_COLUMNS, columns, strict=True):
        kind = SCHEMA.field(name).type
        lists = pa.ListArray.from_arrays(offsets, pa.array(value_T).cast(kind.value_type), type=kind)
        table = table.append_column(SCHEMA.field(name), lists)
    return table.select(SCHEMA.names)


def _row(trajectory: Trajectory, step: int, text: _Text) -> dict[str, Any]:
    """The values of the columns that do not grow with the tokens."""
    truth = (trajectory.prompt.row.get("reward_model") or {}).get("ground_truth")
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "data_source": trajectory.prompt.data_source,
        "question": _whole(question_of(trajectory.prompt.row)),
        "ground_truth": None if truth is None else _json(truth),
        "status": None if trajectory.status is None else trajectory.status.value,
        "failure": _whole(trajectory.failure),
        "reward": trajectory.reward,
        "reward_components": trajectory.reward_components,
        "num_turns": trajectory.num_turns,
        "num_valid_actions": trajectory.num_valid_actions,
        "num_searches": trajectory.num_searches,
        "weight_version": trajectory.weight_version,
        "prompt_text": text(_ids(s for s in trajectory.segments if s.source is Source.PROMPT)),
        "response_text": text(_ids(s for s in trajectory.segments if s.source is not Source.PROMPT)),
        "segments": [
            {
                "source": s.source.value,
                "num_tokens": len(s.ids),
                "text": text(s.ids),
                "weight_versions": [{"version": v, "num_tokens": n} for v, n in s.weight_versions] or None,
            }
            for s in trajectory.segments
        ],
        "searches": [_search(event) for event in trajectory.events if was_search(event)],
        "events": [_json(event) for event in trajectory.events],
    }


def _ids(segments: Iterable[Segment]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(segment.ids for segment in segments))


def _search(event: dict[str, Any]) -> dict[str, Any]:
    document_ids = event.get("document_ids")
    return {
        "query": whole_characters(str(event["query"])),
        "document_ids": None if document_ids is None else [whole_characters(str(each)) for each in document_ids],
        "ms": event.get("milliseconds"),
    }


def _json(value: Any) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False, default=_plain))


def _whole(text: str | None) -> str | None:
    return None if text is None else whole_characters(text)


def _plain(value: Any) -> Any:
    """A numpy array or scalar as Python values; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# What the trainer knew about each token, as optional columns of the store after those of `SCHEMA`.


@dataclass(frozen=True)
class TokenValues:
    """Values of the tokens of some trajectories. `rows`: indices of the trajectories that have values; `lengths_B`:
    their lengths in tokens. `columns`: by name, the values and whether each one is known, both [T] over these
    trajectories in this order.
    """

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
