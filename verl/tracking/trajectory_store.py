"""Every sampled trajectory in Parquet, one file a step, for people and tools to read.

Columns are those of `SCHEMA`. Ids, mask and log-probs are exactly what was trained; text is decoded for reading only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.protocol import Segment, Source, Trajectory

Kind = Literal["train", "val", "val_ref", "test"]
Decode = Callable[[list[int]], str]

SEGMENT = pa.struct([("source", pa.string()), ("num_tokens", pa.int32()), ("text", pa.string())])
SEARCH = pa.struct([("query", pa.string()), ("document_ids", pa.list_(pa.string())), ("ms", pa.float64())])
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.string()),
        ("data_source", pa.string()),
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


def trajectories_path(run_dir: Path | str, kind: Kind, step: int) -> Path:
    """`{run_dir}/trajectories/{kind}_step_{step}.parquet`."""
    return Path(run_dir) / "trajectories" / f"{kind}_step_{step}.parquet"


def write_trajectories(
    run_dir: Path | str, kind: Kind, step: int, trajectories: Sequence[Trajectory], decode: Decode
) -> Path:
    """Write all trajectories of a step, failed ones included; the file appears whole or not at all.

    `decode` turns token ids into text (special tokens kept, so that a reader sees what the model saw). A search is
    an event with a `query` that was not refused (`executed` false); its `document_ids` and `milliseconds` are kept
    where the environment gave them. Appends nothing: a file of the same step is replaced.
    """
    path = trajectories_path(run_dir, kind, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_row(trajectory, step, decode) for trajectory in trajectories], schema=SCHEMA)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_trajectories(path: Path | str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a file as plain Python values; `events` and `ground_truth` are parsed, components are a dict.

    `columns` reads only those. Raises DataError if there is no such file or it is not Parquet.
    """
    try:
        table = pq.read_table(Path(path), columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read trajectories from {path}: {error}") from error
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        if "events" in row:
            row["events"] = [json.loads(event) for event in row["events"]]
        if row.get("ground_truth") is not None:
            row["ground_truth"] = json.loads(row["ground_truth"])
    return rows


def find_trajectories(run_dir: Path | str, kind: Kind) -> dict[int, Path]:
    """The files of a kind by step, in order of step."""
    prefix = f"{kind}_step_"
    paths = (Path(run_dir) / "trajectories").glob(f"{prefix}*.parquet")
    return dict(sorted((int(path.stem.removeprefix(prefix)), path) for path in paths))


def _row(trajectory: Trajectory, step: int, decode: Decode) -> dict[str, Any]:
    truth = (trajectory.prompt.row.get("reward_model") or {}).get("ground_truth")
    prompt = [s for s in trajectory.segments if s.source is Source.PROMPT]
    response = [s for s in trajectory.segments if s.source is not Source.PROMPT]
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "data_source": trajectory.prompt.data_source,
        "ground_truth": None if truth is None else _json(truth),
        "status": None if trajectory.status is None else trajectory.status.value,
        "failure": trajectory.failure,
        "reward": trajectory.reward,
        "reward_components": trajectory.reward_components,
        "num_turns": trajectory.num_turns,
        "num_valid_actions": trajectory.num_valid_actions,
        "num_searches": trajectory.num_searches,
        "weight_version": trajectory.weight_version,
        "prompt_text": _text(prompt, decode),
        "response_text": _text(response, decode),
        "segments": [
            {"source": s.source.value, "num_tokens": len(s.ids), "text": decode(list(s.ids))}
            for s in trajectory.segments
        ],
        "searches": [_search(event) for event in trajectory.events if _is_search(event)],
        "events": [_json(event) for event in trajectory.events],
        "ids": trajectory.ids,
        "loss_mask": trajectory.loss_mask,
        "log_probs": trajectory.log_probs,
    }


def _text(segments: Sequence[Segment], decode: Decode) -> str:
    return decode([token for segment in segments for token in segment.ids])


def _is_search(event: dict[str, Any]) -> bool:
    return event.get("query") is not None and event.get("executed") is not False


def _search(event: dict[str, Any]) -> dict[str, Any]:
    document_ids = event.get("document_ids")
    return {
        "query": str(event["query"]),
        "document_ids": None if document_ids is None else [str(document_id) for document_id in document_ids],
        "ms": event.get("milliseconds"),
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """numpy arrays and scalars as Python values; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
