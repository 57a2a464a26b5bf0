"""The queries behind the pages (lists, groups, single rows, comparisons of two files), and the filters of the list, as
query parameters and as SQL.

Every query names its files; `filename` and `file_row_number` come from DuckDB and locate a row.
"""

from __future__ import annotations

import asyncio
import glob
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import duckdb
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from search_r1.viewer.runs import StepFile, printable
from search_r1.viewer.segments import gold_answers
from verl.errors import DataError
from verl.protocol import by_number
from verl.tracking.trajectory_store import SCHEMA

Condition = tuple[str, Any]  # a piece of SQL with one `?`, and its value

MAX_PAGE = 500
SORTS = {
    "step": "step",
    "reward": "reward",
    "data_source": "data_source",
    "status": "status",
    "searches": "num_searches",
    "turns": "num_turns",
    "tokens": "len(loss_mask)",
    "question": "question",
    "component": "reward_components[?]",
}
_RANGES = {
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "min_searches": "num_searches >= ?",
    "max_searches": "num_searches <= ?",
    "min_tokens": "len(loss_mask) >= ?",
    "max_tokens": "len(loss_mask) <= ?",
    "source": "data_source = ?",
    "status": "status = ?",
    "group": "group_id = ?",
    "question": "contains(lower(question), lower(?))",
    "text": "contains(lower(response_text), lower(?))",
}


class Filters(BaseModel):
    """Filters of the list of rows. All are optional, and all must match. `text` and `question` match anywhere, ignoring
    case.

    `component` names a reward component, to which `min_component`, `max_component` and sort `component` apply. Lengths
    are in tokens of the whole trajectory, including its prompt and the contexts of further sequences.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str | None = None
    step: int | None = None
    source: str | None = None
    status: str | None = None
    group: str | None = None
    question: str | None = None
    text: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_searches: int | None = None
    max_searches: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    component: str | None = None
    min_component: float | None = None
    max_component: float | None = None
    sort: Literal["step", "reward", "data_source", "status", "searches", "turns", "tokens", "question", "component"] = (
        "step"
    )
    descending: bool = False
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=50, ge=1, le=MAX_PAGE)

    @model_validator(mode="after")
    def _named(self) -> Self:
        asks = self.min_component is not None or self.max_component is not None or self.sort == "component"
        if asks and self.component is None:
            raise ValueError("component is missing: min_component, max_component and sort=component are about one")
        return self

    def conditions(self) -> Iterator[Condition]:
        """The conditions on a row, without kind and step, which select files."""
        for name, sql in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                yield sql, value

    def component_conditions(self) -> Iterator[tuple[str, list[Any]]]:
        """The conditions on a component; each has two values."""
        for sign, limit in ((">=", self.min_component), ("<=", self.max_component)):
            if limit is not None:
                yield f"reward_components[?] {sign} ?", [self.component, limit]

    def where(self) -> tuple[str, list[Any]]:
        """A WHERE clause (or an empty text) and its values."""
        found = [(sql, [value]) for sql, value in self.conditions()] + list(self.component_conditions())
        clause = " AND ".join(f"({sql})" for sql, _ in found)
        return (f"WHERE {clause}" if found else ""), [value for _, values in found for value in values]

    def order(self) -> tuple[str, list[Any]]:
        """An ORDER BY clause that orders all rows unambiguously, and its values."""
        way = "DESC" if self.descending else "ASC"
        values = [self.component] if self.sort == "component" else []
        return f"ORDER BY {SORTS[self.sort]} {way} NULLS LAST, filename, file_row_number", values


class RowsQuery(Filters):
    """A page of the list of a run."""

    run: str


class CompareQuery(Filters):
    """A page of the questions of two files."""

    run: str
    file: str
    other_run: str
    other_file: str


Row = dict[str, Any]

BRIEF = """
    filename, file_row_number AS row, step, group_id, data_source, question, status, failure, reward,
    reward_components, num_turns, num_searches, len(loss_mask) AS num_tokens
"""
SHORT = "ground_truth, right(response_text, 160) AS ending, events[-1] AS last_event"
MOST_GOLD, LONGEST_GOLD = 50, 400  # answers, and characters of one, in a row of the list
MOST_SAMPLES = 64  # of a group or a question that are shown
DECIMALS = 9  # of a mean: the same rewards in another order have another sum, by its last bit
QUESTION_KEY = "coalesce(question, prompt_text)"
"""Equal for the samples of one question in any step; in a file without questions, the prompt."""
T = TypeVar("T")
Cursor = duckdb.DuckDBPyConnection

_READ = "file_row_number = true, hive_partitioning = false"  # a folder `step=7` is no column
MEMORY = "2GB"  # at most: a file with thousands of long rows in one row group takes 1 GB; the store writes smaller ones
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": MEMORY,
    "threads": 2,
    "autoinstall_known_extensions": False,  # nothing is fetched
    "autoload_known_extensions": False,
    "preserve_insertion_order": False,  # every query that needs an order says which
}


def list_rows(cursor: Cursor, files: Sequence[StepFile], filters: Filters) -> Row:
    """`total`: the number of rows that match the filters; `rows`: one page of them."""
    if not files:
        return {"total": 0, "rows": []}
    # Count all that match, and read one page of them.
    where, values = filters.where()
    order, order_values = filters.order()
    source, paths = _source(files)
    total = cursor.execute(f"SELECT count(*) FROM {source} {where}", [paths, *values]).fetchall()[0][0]
    page = rows_of(
        cursor,
        f"SELECT {BRIEF} FROM {source} {where} {order} LIMIT ? OFFSET ?",
        [paths, *values, *order_values, filters.limit, filters.offset],
    )
    # Texts for this page, and names in place of paths.
    _add_short(cursor, page)
    names = {str(file.path): file.name for file in files}
    return {"total": total, "rows": [{"file": names[row.pop("filename")], **row} for row in page]}


def facets(cursor: Cursor, files: Sequence[StepFile]) -> Row:
    """The values to choose from: `sources`, `statuses` and `components`, with the number of rows for each."""
    if not files:
        return {"sources": {}, "statuses": {}, "components": {}}
    source, paths = _source(files)
    # A row has one source and one status, but counts for each of its components.
    columns = {"sources": "data_source", "statuses": "status", "components": "unnest(map_keys(reward_components))"}
    found = {
        name: cursor.execute(
            f"SELECT value, count(*) FROM (SELECT {sql} AS value FROM {source}) WHERE value IS NOT NULL GROUP BY 1",
            [paths],
        ).fetchall()
        for name, sql in columns.items()
    }
    return {name: dict(sorted(counts, key=lambda one: by_number(one[0]))) for name, counts in found.items()}


def read_row(cursor: Cursor, file: StepFile, row: int) -> Row:
    """All columns of a row. Raises DataError if there is none."""
    source, paths = _source([file])
    found = rows_of(cursor, f"SELECT * FROM {source} WHERE file_row_number = ?", [paths, row])
    if not found:
        raise DataError(f"{file.path} has no row {row}")
    return found[0]


def rewards_of_group(cursor: Cursor, file: StepFile, group_id: str) -> list[tuple[int, float | None]]:
    """(row, reward) of the samples of a prompt, in the order of the file."""
    source, paths = _source([file])
    sql = f"SELECT file_row_number, reward FROM {source} WHERE group_id = ? ORDER BY 1"
    return cursor.execute(sql, [paths, group_id]).fetchall()


def rows_of_group(cursor: Cursor, file: StepFile, group_id: str) -> list[Row]:
    """All columns of the first MOST_SAMPLES samples of a prompt, in the order of the file."""
    source, paths = _source([file])
    sql = f"SELECT * FROM {source} WHERE group_id = ? ORDER BY file_row_number LIMIT ?"
    return rows_of(cursor, sql, [paths, group_id, MOST_SAMPLES])


def rewards_of_question(cursor: Cursor, file: StepFile, data_source: str, key: str) -> list[tuple[int, float | None]]:
    """(row, reward) of the samples of a question, in the order of the file."""
    source, paths = _source([file])
    sql = f"SELECT file_row_number, reward FROM {source} WHERE data_source = ? AND {QUESTION_KEY} = ? ORDER BY 1"
    return cursor.execute(sql, [paths, data_source, key]).fetchall()


def rows_of_question(cursor: Cursor, file: StepFile, data_source: str, key: str) -> list[Row]:
    """All columns of the first MOST_SAMPLES samples of a question, in whatever group they were sampled."""
    source, paths = _source([file])
    return rows_of(
        cursor,
        f"SELECT * FROM {source} WHERE data_source = ? AND {QUESTION_KEY} = ? ORDER BY file_row_number LIMIT ?",
        [paths, data_source, key, MOST_SAMPLES],
    )


def compare(cursor: Cursor, left: StepFile, right: StepFile, filters: Filters) -> Row:
    """The questions in both files, with the mean reward in each; the largest decrease comes first.

    `total` questions, how many rose, fell and stayed the same, how many have no reward in one of the files
    (`unscored`), how many are in only one file, and a page of `rows`.
    Only the filters `source`, `question`, `offset`, `limit` and `descending` (most improved first) apply.
    """
    way = "DESC" if filters.descending else "ASC"
    joined, values = _joined(left, right, filters)

    # How many questions changed in which direction; an outer join also counts those in one file only.
    counts = rows_of(
        cursor,
        f"""{joined} SELECT count(l.key) FILTER (r.key IS NOT NULL) AS total,
        count(*) FILTER (r.reward > l.reward) AS rose, count(*) FILTER (r.reward < l.reward) AS fell,
        count(*) FILTER (r.reward = l.reward) AS stayed,
        count(*) FILTER (l.key IS NOT NULL AND r.key IS NOT NULL AND (r.reward - l.reward) IS NULL) AS unscored,
        count(*) FILTER (r.key IS NULL) AS only_left, count(*) FILTER (l.key IS NULL) AS only_right
        FROM l FULL JOIN r ON l.data_source = r.data_source AND l.key = r.key""",
        values,
    )[0]

    # One page of the questions in both files.
    rows = rows_of(
        cursor,
        f"""{joined} SELECT l.data_source AS data_source, left(l.key, 400) AS question, l.row AS left_row,
        r.row AS right_row, l.reward AS left_reward, r.reward AS right_reward, l.num AS left_num, r.num AS right_num,
        r.reward - l.reward AS change FROM l JOIN r ON l.data_source = r.data_source AND l.key = r.key
        ORDER BY change {way} NULLS LAST, data_source, question LIMIT ? OFFSET ?""",
        [*values, filters.limit, filters.offset],
    )
    return {**counts, "rows": rows}


def _joined(left: StepFile, right: StepFile, filters: Filters) -> tuple[str, list[Any]]:
    """Two tables `l` and `r` of questions, as a WITH clause."""
    where, conditions = Filters(source=filters.source, question=filters.question).where()
    parts, values = [], []
    for name, file in (("l", left), ("r", right)):
        source, paths = _source([file])
        parts.append(
            f"{name} AS (SELECT data_source, {QUESTION_KEY} AS key, round(avg(reward), {DECIMALS}) AS reward, "
            f"count(*) AS num, min(file_row_number) AS row FROM {source} {where} GROUP BY 1, 2)"
        )
        values += [paths, *conditions]
    return f"WITH {', '.join(parts)}", values


def _source(files: Sequence[StepFile]) -> tuple[str, list[str]]:
    """The source of a SELECT over the rows of `files`, with one `?`, and the value of that."""
    read = f"read_parquet(?, filename = true, union_by_name = true, {_READ})"
    if not any([_has_question(file.path, file.stamp) for file in files]):  # a list: every file is checked
        read = f"(SELECT *, NULL::VARCHAR AS question FROM {read})"
    return read, [glob.escape(str(file.path)) for file in files]


@lru_cache(maxsize=16384)
def _has_question(path: Path, _stamp: int) -> bool:
    """Whether a file has the column `question`, which those of older runs lack; cached until the file changes.

    Raises DataError for a file that does not hold trajectories.
    """
    if printable(str(path)) != str(path):
        raise DataError(
            f"{printable(str(path))}: no Parquet file can be opened whose path is not UTF-8; rename the folder"
        )
    try:
        names = pq.read_schema(path).names
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read trajectories from {path}: {error}") from error
    # DuckDB would fill a missing column with nulls, or refuse the query: say which file is wrong instead.
    missing = [name for name in SCHEMA.names if name not in (*names, "question")]
    if missing:
        raise DataError(f"{path}: holds no trajectories: columns {', '.join(missing)} are missing")
    return "question" in names


def _add_short(cursor: Cursor, rows: list[Row]) -> None:
    """Add the short texts to the rows of one page: to read them for all rows that are sorted would take seconds."""
    # A row number counts within its file, so that each file is asked for its own rows.
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        by_file.setdefault(row["filename"], []).append(row)
    for path, own in by_file.items():
        texts = rows_of(
            cursor,
            f"SELECT file_row_number, {SHORT} FROM read_parquet(?, {_READ}) WHERE list_contains(?, file_row_number)",
            [glob.escape(path), [row["row"] for row in own]],
        )
        by_number = {text.pop("file_row_number"): text for text in texts}
        for row in own:
            row.update(by_number[row["row"]])
            row["answer"] = _answer(row.pop("last_event"))
            row["gold"] = [answer[:LONGEST_GOLD] for answer in gold_answers(row.pop("ground_truth"))[:MOST_GOLD]]


def _answer(event: str | None) -> str | None:
    """The answer in the stored event of the last turn, as the environment read it; None without one."""
    parsed = json.loads(event) if event else None
    answer = parsed.get("answer") if isinstance(parsed, dict) else None
    return None if answer is None else str(answer)


# DuckDB over the Parquet files: queries run in threads, and are interrupted when nobody waits for them.


class Database:
    """Queries files; stores nothing."""

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config=_SETTINGS)
        self._connection.execute("SET parquet_metadata_cache = true")

    async def run(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in a thread, with its own cursor; cancelling interrupts its query. Raises DataError."""
        cursor = self._connection.cursor()
        try:
            return await asyncio.to_thread(work, cursor)
        except asyncio.CancelledError:
            # Cancelling ends the wait, and not the thread: its query has to be ended, too.
            cursor.interrupt()
            raise
        except duckdb.OutOfMemoryException as error:
            raise DataError(
                f"the trajectories take more than the {MEMORY} of memory that the viewer may use; with functions of "
                "verl.tracking.trajectory_store, write the file again in smaller row groups: "
                "write_trajectory_table(path, read_trajectory_table(path))"
            ) from error
        except duckdb.Error as error:
            raise DataError(f"cannot read trajectories: {error}") from error


def rows_of(cursor: Cursor, sql: str, values: list[Any]) -> list[dict[str, Any]]:
    """The result of a query, one dict per row."""
    found = cursor.execute(sql, values)
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
