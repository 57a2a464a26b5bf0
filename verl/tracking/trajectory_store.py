"""Every sampled trajectory in Parquet, one file per step, for people and tools to read, and to be loaded again.

Columns are those of `SCHEMA`. Ids, mask and log-probs are exactly what was trained, one sequence of a trajectory after
the other; text is decoded for reading only, and `render_trajectory` writes one trajectory as Markdown.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.process.storage import whole_file
from verl.protocol import Trajectory
from verl.tracking.trajectory_columns import (
    PARSERS,
    SCHEMA,
    TURN_REWARDS,
    Decode,
    TokenValues,
    from_row,
    to_table,
    with_token_values,
)

__all__ = [
    "SCHEMA",
    "find_trajectories",
    "load_trajectories",
    "parse_trajectories",
    "read_trajectories",
    "read_trajectory_table",
    "run_of_file",
    "trajectories_path",
    "write_trajectories",
    "write_trajectory_table",
]

Kind = Literal["train", "val", "val_ref", "test"]
ROW_GROUP_BYTES = 16 * 2**20  # in memory: DuckDB, with which the viewer reads, needs several times that to read one row


def trajectories_path(run_dir: Path | str, kind: Kind, step: int) -> Path:
    """`{run_dir}/trajectories/{kind}_step_{step}.parquet`."""
    return Path(run_dir) / "trajectories" / f"{kind}_step_{step}.parquet"


def run_of_file(path: Path) -> Path:
    """The folder of the run that wrote the file of trajectories `path`; the file's own folder if no run did."""
    folder = path.absolute().parent
    return folder.parent if folder.name == "trajectories" else folder


def find_trajectories(run_dir: Path | str, kind: Kind) -> dict[int, Path]:
    """The files of a kind by step, in order of step. Others beside them, such as rescored ones, are passed over."""
    prefix = f"{kind}_step_"
    paths = (Path(run_dir) / "trajectories").glob(f"{prefix}*.parquet")
    by_step = {path.stem.removeprefix(prefix): path for path in paths}
    return dict(sorted((int(step), path) for step, path in by_step.items() if step.isdecimal()))


def write_trajectories(
    run_dir: Path | str,
    kind: Kind,
    step: int,
    trajectories: Sequence[Trajectory],
    decode: Decode,
    values: TokenValues | None = None,
) -> Path:
    """Write all trajectories of a step, failed ones included; the file appears whole or not at all.

    `decode` turns token ids into text (special tokens kept, so that a reader sees what the model saw). A search is an
    event with a `query` that was not refused (`executed` false); its `document_ids` and `milliseconds` are kept where
    the environment gave them. `values` adds the columns of `token_columns`. An existing file of the step is replaced.
    """
    path = trajectories_path(run_dir, kind, step)
    table = to_table(trajectories, step, decode)
    write_trajectory_table(path, table if values is None else with_token_values(table, values))
    return path


def write_trajectory_table(path: Path, table: pa.Table) -> None:
    """Write `table` to `path`, making its folder; the file appears whole or not at all. Raises StorageError."""
    with whole_file(path) as temporary:
        rows = ROW_GROUP_BYTES * len(table) // max(1, table.nbytes)
        pq.write_table(table, temporary, compression="zstd", row_group_size=max(1, rows))


def read_trajectories(path: Path | str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a file as plain Python values; `events` and `ground_truth` are parsed, components are a dict.

    `columns` reads only those. Raises DataError if there is no such file, it is not Parquet, or a row cannot be parsed.
    """
    return _parse(_read(path, columns), path)


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories that were written to `path`, with the same ids, segments, log-probs, events and numbers.

    Their dataset rows have only what was stored: `data_source`, `reward_model.ground_truth` and `question`. Raises
    DataError naming file and row, also for a trajectory whose sequences do not fit together.
    """
    return parse_trajectories(read_trajectory_table(path), path)


def read_trajectory_table(path: Path | str) -> pa.Table:
    """A file as a table: the columns of `SCHEMA` with its types, then any others; a missing `question` is null.

    Raises DataError for a file that does not hold trajectories.
    """
    table = _read(path)
    # Files of older runs lack the question.
    if "question" not in table.column_names:
        table = table.append_column("question", pa.nulls(len(table), pa.string()))
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise DataError(f"{path}: holds no trajectories: columns {', '.join(missing)} are missing")
    further = table.drop_columns(SCHEMA.names)
    try:
        stored = table.select(SCHEMA.names).cast(SCHEMA)
    except pa.ArrowException as error:
        raise DataError(f"{path}: holds no trajectories: {error}") from error
    return pa.table([*stored.columns, *further.columns], schema=pa.schema([*SCHEMA, *further.schema]))


def parse_trajectories(table: pa.Table, path: Path | str) -> list[Trajectory]:
    """The trajectories of a table that was read from `path`. Raises DataError naming file and row."""
    trajectories = []
    names = [name for name in table.column_names if name in (*SCHEMA.names, TURN_REWARDS.name)]
    for number, row in enumerate(_parse(table.select(names), path)):
        try:
            trajectories.append(from_row(row))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: row {number}: {error}") from error
    return trajectories


def _read(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    if not Path(path).exists():
        raise DataError(f"cannot read trajectories from {path}: no such file")
    try:
        return pq.read_table(Path(path), columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read trajectories from {path}: {error}") from error


def _parse(table: pa.Table, path: Path | str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist()
    for number, row in enumerate(rows):
        try:
            row |= {name: parse(row[name]) for name, parse in PARSERS.items() if row.get(name) is not None}
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: row {number}: {error}") from error
    return rows


Row = dict[str, Any]
READING_COLUMNS = (
    "group_id",
    "data_source",
    "ground_truth",
    "status",
    "failure",
    "reward",
    "num_turns",
    "num_searches",
    "prompt_text",
    "segments",
)
TURN_TAG = re.compile(r"(?=<(?:think|search|answer)>)")


def choose_three(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Up to three different trajectories with a caption: solved with several searches, not solved, and any other.

    Solved means a positive reward; among several, the highest reward wins, then the most searches. As the unsolved one,
    a wrong answer is preferred to an infrastructure failure.
    """
    left = list(rows)
    chosen: list[tuple[str, Row]] = []

    def take(caption: str, candidates: list[Row], key: Callable[[Row], Any] | None = None) -> None:
        if not candidates:
            return
        # The draw is the same each time, and no trajectory is taken twice.
        row = max(candidates, key=key) if key else random.Random(0).choice(candidates)
        left.remove(row)
        chosen.append((caption, row))

    solved = [row for row in left if (row["reward"] or 0) > 0]
    several = [row for row in solved if row["num_searches"] >= 2]
    take("Solved with several searches" if several else "Solved", several or solved, _reward_and_searches)
    wrong = [row for row in left if row["reward"] is not None and row["reward"] <= 0]
    take("Not solved", wrong or [row for row in left if row["status"] == "failed"], _reward_and_searches)
    take("Drawn at random", left)
    return chosen


def _reward_and_searches(row: Row) -> tuple[float, int]:
    return row["reward"] or 0.0, row["num_searches"]


def render_trajectory(row: Row) -> str:
    """Facts of the row, then the prompt and each segment: what the policy wrote as text, all else as a quotation.

    Several sequences have a heading each, and a further one begins with its context.
    """
    sources = [segment["source"] for segment in row["segments"]]
    number, count = 1, 1 + sources.count("context")
    blocks = [_facts(row), _heading(number, count), _quote("prompt", row["prompt_text"])]
    for segment in row["segments"]:
        if segment["source"] == "policy":
            # One fenced block, in which each tag is on a line of its own.
            parts = [part.strip() for part in TURN_TAG.split(segment["text"])]
            blocks.append(_fence("\n".join(part for part in parts if part)))
        elif segment["source"] == "environment":
            blocks.append(_quote("environment", segment["text"]))
        elif segment["source"] == "context":
            number += 1
            blocks += [_heading(number, count), _quote("context", segment["text"])]
    return "\n\n".join(block for block in blocks if block)


def _heading(number: int, count: int) -> str:
    return f"**Sequence {number} of {count}**" if count > 1 else ""


def _facts(row: Row) -> str:
    reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
    facts = [
        f"data source {row['data_source']}",
        f"status {row['status']}",
        f"reward {reward}",
        f"{row['num_turns']} turns",
        f"{row['num_searches']} searches",
    ]
    if row["ground_truth"] is not None:
        # The shipped rewards compare with `target`; other data sets have a form of their own.
        truth = row["ground_truth"]
        target = truth.get("target", truth) if isinstance(truth, dict) else truth
        answers = target if isinstance(target, list) else [target]
        facts.append("expected " + " or ".join(f"`{answer}`" for answer in answers))
    if row["failure"]:
        facts.append(f"failure: {row['failure']}")
    return ", ".join(facts) + "."


def _quote(title: str, text: str) -> str:
    body = _fence(text.strip())
    return "\n".join(f"> {line}".rstrip() for line in [f"*{title}*", "", *body.splitlines()])


def _fence(text: str) -> str:
    """`text` in a fenced block; the fence is longer than any run of backquotes inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
