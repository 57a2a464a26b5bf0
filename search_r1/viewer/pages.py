"""The content of each route's reply, as plain values; the routes themselves are in `app`."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from search_r1.viewer import dashboard, queries
from search_r1.viewer.dashboard import COLUMN, group_advantages, stored_advantages
from search_r1.viewer.queries import Cursor, Database, Filters
from search_r1.viewer.runs import Run, RunSettings, StepFile, find_runs, read_settings, tokenizer_file
from search_r1.viewer.trajectory import describe
from verl.errors import DataError

T = TypeVar("T")
Row = dict[str, Any]


class Pages:
    """Looks for runs again at each request, so that new files are seen. All methods raise DataError."""

    def __init__(self, paths: Sequence[Path], tokenizer: Path | None = None) -> None:
        self._paths = list(paths)
        self._tokenizer = None if tokenizer is None else tokenizer_file(tokenizer)
        self._database = Database()

    def runs(self) -> list[Row]:
        """Runs with their files; `version` changes when a file does."""
        return [
            {
                "name": run.name,
                "path": str(run.path),
                "version": run.version,
                "files": [
                    {"name": file.name, "kind": file.kind, "step": file.step, "stamp": str(file.stamp)}
                    for file in run.files
                ],
            }
            for run in find_runs(self._paths)
        ]

    async def rows(self, run: str, filters: Filters) -> Row:
        """A page of the list, and the total number of rows."""
        files = (await to_thread(self._run, run)).chosen(filters.kind, filters.step)
        return await self._ask(partial(queries.list_rows, files=files, filters=filters))

    async def facets(self, run: str, kind: str | None, step: int | None) -> Row:
        """The values that the filters can be set to."""
        files = (await to_thread(self._run, run)).chosen(kind, step)
        return await self._ask(partial(queries.facets, files=files))

    async def trajectory(self, run: str, name: str, row: int) -> Row:
        """One trajectory with its tokens, and its position in its group."""
        found, file, settings = await to_thread(self._open, run, name)

        def read(cursor: Cursor) -> Row:
            stored = queries.read_row(cursor, file, row)
            group = queries.rewards_of_group(cursor, file, stored["group_id"])
            return {**describe(stored, settings, file.kind), "group": _place(group, row, stored, settings, file.kind)}

        return {"run": found.name, "file": file.name, "kind": file.kind, "row": row, **await self._ask(read)}

    async def group(self, run: str, name: str, group_id: str) -> Row:
        """The samples of a prompt, with their advantages."""
        found, file, settings = await to_thread(self._open, run, name)
        rows = await self._ask(partial(queries.rows_of_group, file=file, group_id=group_id))
        if not rows:
            raise DataError(f"{file.path} has no group {group_id!r}")
        return self._samples(found, file, settings, rows)

    async def question(self, run: str, name: str, row: int, other_run: str, other_name: str) -> Row:
        """The samples of a row's question in another file (of any run)."""
        _, file, _ = await to_thread(self._open, run, name)
        found, other, settings = await to_thread(self._open, other_run, other_name)

        def read(cursor: Cursor) -> list[Row]:
            stored = queries.read_row(cursor, file, row)
            key = stored["prompt_text"] if stored.get("question") is None else stored["question"]
            return queries.rows_of_question(cursor, other, stored["data_source"], key)

        return self._samples(found, other, settings, await self._ask(read))

    async def comparison(self, left: tuple[str, str], right: tuple[str, str], filters: Filters) -> Row:
        """The questions of two files, each given by run and name, compared."""
        _, first, _ = await to_thread(self._open, *left)
        _, second, _ = await to_thread(self._open, *right)
        return await self._ask(partial(queries.compare, left=first, right=second, filters=filters))

    async def dashboard(self, names: Sequence[str], by_seed: bool) -> Row:
        """The curves of runs."""
        return await to_thread(lambda: dashboard.dashboard(self._runs(names), by_seed))

    async def dashboard_version(self, names: Sequence[str]) -> Row:
        """A value that changes when one of the runs logs a step."""
        return {"version": await to_thread(lambda: dashboard.version_of(self._runs(names)))}

    async def timeline(self, run: str, step: int) -> Row:
        """What each process did during a step."""
        return await to_thread(lambda: dashboard.timeline(self._run(run), step))

    async def _ask(self, work: Callable[[Cursor], T]) -> T:
        return await self._database.run(work)

    def _run(self, name: str) -> Run:
        return self._runs([name])[0]

    def _runs(self, names: Sequence[str]) -> list[Run]:
        found = {run.name: run for run in find_runs(self._paths)}
        missing = next((name for name in names if name not in found), None)
        if missing is not None:
            raise DataError(f"there is no run {missing!r}; was its folder moved?")
        return [found[name] for name in names]

    def _open(self, run: str, name: str) -> tuple[Run, StepFile, RunSettings]:
        found = self._run(run)
        return found, found.file(name), read_settings(found.folder, self._tokenizer)

    def _samples(self, run: Run, file: StepFile, settings: RunSettings, rows: Sequence[Row]) -> Row:
        advantages, formula = _advantages(rows, settings, file.kind)
        samples = [
            {"row": row["file_row_number"], "advantage": advantage, **describe(row, settings, file.kind, False)}
            for row, advantage in zip(rows, advantages, strict=True)
        ]
        return {"run": run.name, "file": file.name, "kind": file.kind, "formula": formula, "samples": samples}


def _place(group: Sequence[tuple[int, float | None]], row: int, stored: Row, settings: RunSettings, kind: str) -> Row:
    """Where a row stands among the `group` of (row, reward), and its advantage; `stored` has all columns of the row."""
    rewards = [reward for _, reward in group]
    known = [reward for reward in rewards if reward is not None]
    place = [number for number, _ in group].index(row)
    # What the loss saw, if the file has it; else it is computed, for which the rewards of the whole group are needed.
    if COLUMN in stored:
        [advantage], formula = _advantages([stored], settings, kind)
    else:
        advantages, formula = _advantages([{"reward": reward} for reward in rewards], settings, kind)
        advantage = advantages[place]
    return {
        "rows": [number for number, _ in group],
        "rewards": rewards,
        "mean_reward": sum(known) / len(known) if known else None,
        "advantage": advantage,
        "formula": formula,
    }


def _advantages(rows: Sequence[Row], settings: RunSettings, kind: str) -> tuple[list[float | None], str]:
    """The advantages of samples, and their formula; None and "" for a file that was not trained on."""
    if kind != "train":
        return [None] * len(rows), ""
    if all(COLUMN in row for row in rows):
        return stored_advantages([row[COLUMN] for row in rows])
    advantages, formula = group_advantages([row["reward"] for row in rows], settings)
    return advantages, f"{formula}, from the stored rewards" if formula else ""
