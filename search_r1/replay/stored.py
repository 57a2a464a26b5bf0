"""Stored trajectories as objects, and the table they came from: what a command does not change is written unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from verl.agent.text import check_decoding
from verl.errors import DataError
from verl.protocol import Trajectory
from verl.tracking.trajectory_store import parse_trajectories, read_trajectory_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LOG_PROBS_UNDER = "log_probs_under"


@dataclass(frozen=True)
class Stored:
    """Rows of one or more files, in order; `places[i]` names file and row of `trajectories[i]`."""

    table: pa.Table
    trajectories: list[Trajectory]
    places: list[str]

    def segment_texts(self) -> list[list[str]]:
        """The stored text of each segment of each trajectory."""
        return [[segment["text"] for segment in row] for row in self.table["segments"].to_pylist()]

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises DataError, naming file and row, unless `tokenizer` decodes all ids to the stored texts."""
        for trajectory, texts, place in zip(self.trajectories, self.segment_texts(), self.places, strict=True):
            for segment, text in zip(trajectory.segments, texts, strict=True):
                try:
                    check_decoding(tokenizer, segment.ids, text)
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error


def read_stored(paths: Sequence[Path]) -> Stored:
    """All rows of all files. Raises DataError, naming file and row, or if there are no rows at all."""
    tables = [read_trajectory_table(path) for path in paths]
    trajectories, places = [], []
    for path, table in zip(paths, tables, strict=True):
        trajectories += parse_trajectories(table, path)
        places += [f"{path}: row {number}" for number in range(len(table))]
    if not trajectories:
        raise DataError(f"no trajectory in {', '.join(map(str, paths))}")
    return Stored(pa.concat_tables(tables, promote_options="default"), trajectories, places)


def add_log_probs(table: pa.Table, values: Sequence[Sequence[float]]) -> pa.Table:
    """`table` with a last column `log_probs_under` list<float32>, aligned with `ids`; an existing one is replaced."""
    if LOG_PROBS_UNDER in table.column_names:
        table = table.drop_columns([LOG_PROBS_UNDER])
    return table.append_column(LOG_PROBS_UNDER, pa.array(values, pa.list_(pa.float32())))
