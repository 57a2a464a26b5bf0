"""Trajectories as the columns of the store, and a row of the store as a trajectory again.

A row is a rollout. Where it has several sequences, the columns of tokens and `segments` hold them one after the other,
and a segment with source "context" begins each further one.

Letters: `R` rollouts, `T` tokens of all of them, concatenated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from verl.agent.text import whole_characters
from verl.protocol import Prompt, Segment, Source, Status, Trajectory, flat_tokens, searches_of

VERSION = pa.struct([("version", pa.int64()), ("num_tokens", pa.int32())])
SEGMENT = pa.struct(
    [
        ("source", pa.string()),
        ("num_tokens", pa.int32()),
        ("text", pa.string()),
        ("weight_versions", pa.list_(VERSION)),  # that sampled it, from its beginning; null where nobody knows
    ]
)
SEARCH = pa.struct([("query", pa.string()), ("document_ids", pa.list_(pa.string())), ("ms", pa.float64())])
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.string()),
        ("data_source", pa.string()),
        ("question", pa.string()),  # of the dataset row or its extra_info; null without one
        ("ground_truth", pa.string()),  # JSON of the dataset row's reward_model.ground_truth; null without one
        ("status", pa.string()),
        ("failure", pa.string()),
        ("reward", pa.float64()),  # null for a failed trajectory
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("num_turns", pa.int32()),
        ("num_valid_actions", pa.int32()),
        ("num_searches", pa.int32()),
        ("weight_version", pa.int64()),
        ("prompt_text", pa.string()),
        ("response_text", pa.string()),  # what policy and environment wrote, without the contexts
        ("segments", pa.list_(SEGMENT)),
        ("searches", pa.list_(SEARCH)),
        ("events", pa.list_(pa.string())),  # JSON of each environment event
        ("ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("log_probs", pa.list_(pa.float32())),
    ]
)
TURN_REWARDS = pa.field("turn_rewards", pa.list_(pa.float64()))
"""A further column, where a trajectory has such: the part of the reward that each of its turns was given; else null."""
NEEDED = ("source", "num_tokens", "text")  # of a segment
NULLABLE = ("question", "ground_truth", "status", "failure", "reward")


def from_row(row: dict[str, Any]) -> Trajectory:
    """The trajectory that `to_table` stored; `row` has been parsed with `PARSERS`.

    Its dataset row has only what was stored: `data_source`, and `reward_model.ground_truth` and `question` where they
    are not null. Raises ValueError or TypeError for a row that cannot be a trajectory.
    """
    empty = [name for name in SCHEMA.names if name not in NULLABLE and row[name] is None]
    if empty:
        raise ValueError(f"column {empty[0]!r} is null")
    segments = list(_segments(row))
    _check_sequences(segments)
    trajectory = Trajectory(
        row["group_id"],
        _prompt(row, segments),
        segments,
        None if row["status"] is None else Status(row["status"]),
        failure=row["failure"],
        reward=row["reward"],
        reward_components=row["reward_components"],
        turn_rewards=tuple(row.get(TURN_REWARDS.name) or ()),
        events=row["events"],
        **{name: row[name] for name in ("num_turns", "num_valid_actions", "num_searches", "weight_version")},
    )
    # The mask is stored for readers of the file; a trajectory has it from its segments, so that both must agree.
    if trajectory.loss_mask != row["loss_mask"]:
        raise ValueError("column 'loss_mask' is not what the sources of the segments say")
    return trajectory


def _segments(row: dict[str, Any]) -> Iterator[Segment]:
    """The segments of a row: its flat columns, cut at the segments' lengths."""
    if any(segment is None or None in (segment[name] for name in NEEDED) for segment in row["segments"]):
        raise ValueError("column 'segments' has a null in a segment")
    # With one number too few, all ids behind it would belong to the wrong segments.
    lengths = [segment["num_tokens"] for segment in row["segments"]]
    for name in ("ids", "log_probs"):
        if None in row[name] or len(row[name]) != sum(lengths):
            raise ValueError(f"column {name!r} does not have the {sum(lengths)} numbers that the segments need")
    ids, log_probs = iter(row["ids"]), iter(row["log_probs"])
    for segment, length in zip(row["segments"], lengths, strict=True):
        source = Source(segment["source"])
        own_ids, own_log_probs = tuple(islice(ids, length)), tuple(islice(log_probs, length))
        if source is Source.CONTEXT and any(own_log_probs):
            raise ValueError("column 'log_probs' is not 0 in a context; a log-prob stands where its token was sampled")
        versions = tuple((one["version"], one["num_tokens"]) for one in segment.get("weight_versions") or ())
        yield Segment(source, own_ids, own_log_probs if source is Source.POLICY else None, versions)


def _check_sequences(segments: Sequence[Segment]) -> None:
    """Raise ValueError for sequences that no rollout can have; segments are counted from 1."""
    sources = [segment.source for segment in segments]
    if Source.CONTEXT not in sources:
        return
    if sources[0] is not Source.PROMPT:
        raise ValueError(f"the first segment is {sources[0]}: a rollout of several sequences begins with its prompt")
    # Only what follows the first context is checked: before it, a row is as one of a single sequence.
    first = sources.index(Source.CONTEXT)
    for number, segment in enumerate(segments[first:], start=first + 1):
        if segment.source is Source.PROMPT:
            raise ValueError(f"segment {number} is a prompt after a context: only the first sequence begins with one")
        if segment.source is Source.CONTEXT and not segment.ids:
            raise ValueError(
                f"segment {number} is a context without ids: nothing would stand before the sequence's turn"
            )
        if segment.source is Source.CONTEXT and segment.weight_versions:
            raise ValueError(
                f"segment {number} is a context with weight versions: only what the policy sampled has them"
            )


def _prompt(row: dict[str, Any], segments: Sequence[Segment]) -> Prompt:
    values: dict[str, Any] = {"data_source": row["data_source"]}
    if row["ground_truth"] is not None:
        values["reward_model"] = {"ground_truth": row["ground_truth"]}
    if row["question"] is not None:
        values["question"] = row["question"]
    ids = [token for segment in segments if segment.source is Source.PROMPT for token in segment.ids]
    return Prompt(tuple(ids), row["data_source"], values)


def _events(texts: list[str]) -> list[dict[str, Any]]:
    events = [json.loads(text) for text in texts]
    if not all(isinstance(event, dict) for event in events):
        raise ValueError("column 'events' has JSON that is not an object")
    return events


def _components(pairs: list[tuple[str, float]]) -> dict[str, float]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("column 'reward_components' has a name twice")
    return dict(pairs)


def question_of(row: dict[str, Any]) -> str | None:
    """The question of a dataset row, from the row or its extra_info; None if there is none."""
    question = row.get("question")
    if question is None:
        question = (row.get("extra_info") or {}).get("question")
    return None if question is None else str(question)


PARSERS: dict[str, Callable[[Any], Any]] = {
    "events": _events,
    "ground_truth": json.loads,
    "reward_components": _components,
}  # from what a column holds to what a reader wants, where it is not null; they raise ValueError or TypeError


Decode = Callable[[list[int]], str]

_Text = Callable[[tuple[int, ...]], str]
_RESPONSE = (Source.POLICY, Source.ENVIRONMENT)
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
    offsets = pa.array(np.concatenate([[0], flat.lengths_R().cumsum()])).cast(pa.int32())
    columns: tuple[npt.NDArray[Any], ...] = (flat.ids_T, flat.loss_mask_T, flat.log_probs_T)
    for name, value_T in zip(_TOKEN_COLUMNS, columns, strict=True):
        kind = SCHEMA.field(name).type
        lists = pa.ListArray.from_arrays(offsets, pa.array(value_T).cast(kind.value_type), type=kind)
        table = table.append_column(SCHEMA.field(name), lists)
    return with_turn_rewards(table.select(SCHEMA.names), trajectories)


def with_turn_rewards(table: pa.Table, trajectories: Sequence[Trajectory]) -> pa.Table:
    """The table of `trajectories` with the column `TURN_REWARDS` as they have it now; without it if none has any."""
    if TURN_REWARDS.name in table.column_names:
        table = table.drop_columns([TURN_REWARDS.name])
    if not any(trajectory.turn_rewards for trajectory in trajectories):
        return table
    given = [list(trajectory.turn_rewards) or None for trajectory in trajectories]
    return table.append_column(TURN_REWARDS, pa.array(given, TURN_REWARDS.type))


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
        "response_text": text(_ids(s for s in trajectory.segments if s.source in _RESPONSE)),
        "segments": [
            {
                "source": s.source.value,
                "num_tokens": len(s.ids),
                "text": text(s.ids),
                "weight_versions": [{"version": v, "num_tokens": n} for v, n in s.weight_versions] or None,
            }
            for s in trajectory.segments
        ],
        "searches": [_search(one) for event in trajectory.events for one in searches_of(event)],
        "events": [_json(event) for event in trajectory.events],
    }


def _ids(segments: Iterable[Segment]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(segment.ids for segment in segments))


def _search(event: Mapping[str, Any]) -> dict[str, Any]:
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
    """Values of the tokens of some trajectories. `rows`: indices of the trajectories that have values; `lengths_R`:
    their lengths in tokens, each of all its sequences together. `columns`: by name, the values and whether each one is
    known, both [T] over these trajectories in this order.
    """

    rows: Sequence[int]
    lengths_R: npt.NDArray[np.int64]
    columns: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]


def with_token_values(table: pa.Table, values: TokenValues) -> pa.Table:
    """`table` of trajectories with one more column for each of `values`."""
    # The values come in the order of `rows`, which need not be that of the table.
    order_T = np.argsort(np.array(values.rows, np.int64).repeat(values.lengths_R), kind="stable")
    # The other rows are null: lists without a length.
    has_values = np.zeros(len(table), np.bool_)
    has_values[list(values.rows)] = True
    lengths = np.zeros(len(table), np.int64)
    lengths[list(values.rows)] = values.lengths_R
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    for name, (value_T, known_T) in values.columns.items():
        numbers = pa.array(value_T[order_T].astype(np.float32), mask=~known_T[order_T])
        column = pa.ListArray.from_arrays(offsets, numbers, type=_LIST, mask=pa.array(~has_values))
        table = table.append_column(pa.field(name, _LIST), column)
    return table
