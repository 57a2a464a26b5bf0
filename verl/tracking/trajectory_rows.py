"""The columns of the store, and how to turn one of its rows back into a trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from verl.protocol import Prompt, Segment, Source, Status, Trajectory

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
        ("response_text", pa.string()),
        ("segments", pa.list_(SEGMENT)),
        ("searches", pa.list_(SEARCH)),
        ("events", pa.list_(pa.string())),  # JSON of each environment event
        ("ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("log_probs", pa.list_(pa.float32())),
    ]
)
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
    trajectory = Trajectory(
        row["group_id"],
        _prompt(row, segments),
        segments,
        None if row["status"] is None else Status(row["status"]),
        failure=row["failure"],
        reward=row["reward"],
        reward_components=row["reward_components"],
        events=row["events"],
        **{name: row[name] for name in ("num_turns", "num_valid_actions", "num_searches", "weight_version")},
    )
    if trajectory.loss_mask != row["loss_mask"]:
        raise ValueError("column 'loss_mask' is not what the sources of the segments say")
    return trajectory


def _segments(row: dict[str, Any]) -> Iterator[Segment]:
    """The segments of a row: its flat columns, cut at the segments' lengths."""
    if any(segment is None or None in (segment[name] for name in NEEDED) for segment in row["segments"]):
        raise ValueError("column 'segments' has a null in a segment")
    lengths = [segment["num_tokens"] for segment in row["segments"]]
    for name in ("ids", "log_probs"):
        if None in row[name] or len(row[name]) != sum(lengths):
            raise ValueError(f"column {name!r} does not have the {sum(lengths)} numbers that the segments need")
    ids, log_probs = iter(row["ids"]), iter(row["log_probs"])
    for segment, length in zip(row["segments"], lengths, strict=True):
        source = Source(segment["source"])
        own_ids, own_log_probs = tuple(islice(ids, length)), tuple(islice(log_probs, length))
        versions = tuple((one["version"], one["num_tokens"]) for one in segment.get("weight_versions") or ())
        yield Segment(source, own_ids, own_log_probs if source is Source.POLICY else None, versions)


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
