"""Stored trajectories as objects, scored with another reward; what a command does not change is written unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from verl.agent.text import check_decoding
from verl.errors import DataError, RewardUnavailable
from verl.protocol import Status, Trajectory, by_number
from verl.tracking.trajectory_columns import with_turn_rewards
from verl.tracking.trajectory_store import parse_trajectories, read_trajectory_table
from verl.trainer.sampling.scoring import BatchReward, Reward, score_trajectories

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


@dataclass(frozen=True)
class Change:
    """A row of the result for one data source: how many were scored, how many changed, and the mean of both rewards.

    `old_mean` is over those that had a reward; nan if none had.
    """

    data_source: str
    num_scored: int
    num_changed: int
    old_mean: float
    new_mean: float


@dataclass(frozen=True)
class Rescored:
    """`table` differs from the stored one only in reward, components, status and failure.

    `num_failed` had failed before and are unchanged. `num_unavailable` could not be scored and are failed now.
    """

    table: pa.Table
    changes: list[Change]
    num_failed: int
    num_unavailable: int


def rescore(stored: Stored, rule: Reward | BatchReward, tokenizer: PreTrainedTokenizerBase) -> Rescored:
    """Score every trajectory that did not fail, as training does. Changes `stored.trajectories` in place.

    Raises RewardUnavailable if no trajectory could be scored, and what the rule raises.
    """
    # Forget the old rewards, so that only what the rule says is stored.
    finished = [trajectory for trajectory in stored.trajectories if trajectory.status is not Status.FAILED]
    old = [trajectory.reward for trajectory in finished]
    for trajectory in finished:
        trajectory.reward, trajectory.reward_components, trajectory.turn_rewards = None, {}, ()
    scored = score_trajectories(rule, finished, tokenizer)
    if not scored:
        failures = sorted({trajectory.failure or "" for trajectory in stored.trajectories})
        raise RewardUnavailable(f"none of {len(stored.trajectories)} trajectories could be scored: {failures[0]}")
    return Rescored(
        _with_scores(stored.table, stored.trajectories),
        list(_changes(finished, old)),
        len(stored.trajectories) - len(finished),
        len(finished) - len(scored),
    )


def _changes(finished: Sequence[Trajectory], old: Sequence[float | None]) -> Iterator[Change]:
    for source in sorted({trajectory.prompt.data_source for trajectory in finished}, key=by_number):
        pairs = [
            (before, trajectory.reward)
            for trajectory, before in zip(finished, old, strict=True)
            if trajectory.prompt.data_source == source and trajectory.reward is not None
        ]
        num_changed = sum(before != after for before, after in pairs)
        old_mean = _mean([before for before, _ in pairs if before is not None])
        yield Change(source, len(pairs), num_changed, old_mean, _mean([after for _, after in pairs]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _with_scores(table: pa.Table, trajectories: Sequence[Trajectory]) -> pa.Table:
    columns = {
        "reward": [trajectory.reward for trajectory in trajectories],
        "reward_components": [list(trajectory.reward_components.items()) for trajectory in trajectories],
        "status": [trajectory.status and trajectory.status.value for trajectory in trajectories],
        "failure": [trajectory.failure for trajectory in trajectories],
    }
    for name, values in columns.items():
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    return with_turn_rewards(table, trajectories)
