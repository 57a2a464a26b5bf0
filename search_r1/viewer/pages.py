"""The content of each route's reply, as plain values; the routes themselves are in `app`."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
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
Rewards = Sequence[tuple[int, float | None]]  # (row, reward) of each of a prompt's or a question's samples


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
            return {**describe(stored, settings, file.kind), "group": _place(group, stored, settings, file.kind)}

        return {"run": found.name, "file": file.name, "kind": file.kind, "row": row, **await self._ask(read)}

    async def group(self, run: str, name: str, group_id: str) -> Row:
        """The samples of a prompt, with their advantages; of very many, the first ones."""
        found, file, settings = await to_thread(self._open, run, name)

        def read(cursor: Cursor) -> Row:
            scored = queries.rewards_of_group(cursor, file, group_id)
            if not scored:
                raise DataError(f"{file.path} has no group {group_id!r}")
            return _samples(cursor, file, settings, queries.rows_of_group(cursor, file, group_id), scored)

        return {"run": found.name, **await self._ask(read)}

    async def question(self, run: str, name: str, row: int, other_run: str, other_name: str) -> Row:
        """The samples of a row's question in another file (of any run); of very many, the first ones."""
        _, file, _ = await to_thread(self._open, run, name)
        found, other, settings = await to_thread(self._open, other_run, other_name)

        def read(cursor: Cursor) -> Row:
            stored = queries.read_row(cursor, file, row)
            key = stored["prompt_text"] if stored.get("question") is None else stored["question"]
            scored = queries.rewards_of_question(cursor, other, stored["data_source"], key)
            rows = queries.rows_of_question(cursor, other, stored["data_source"], key)
            return _samples(cursor, other, settings, rows, scored)

        return {"run": found.name, **await self._ask(read)}

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


def _samples(cursor: Cursor, file: StepFile, settings: RunSettings, rows: Sequence[Row], scored: Rewards) -> Row:
    """What is shown of `rows`, which may be the first of many samples; number and mean are those of all, `scored`."""
    ids = {row["group_id"] for row in rows} if file.kind == "train" else ()
    groups = {group_id: queries.rewards_of_group(cursor, file, group_id) for group_id in ids}
    advantages, formula = _advantages(rows, groups, settings, file.kind)
    samples = [
        {"row": row["file_row_number"], "advantage": advantage, **describe(row, settings, file.kind, False)}
        for row, advantage in zip(rows, advantages, strict=True)
    ]
    return {
        "file": file.name,
        "kind": file.kind,
        "num_samples": len(scored),
        "mean_reward": _mean(scored),
        "formula": formula,
        "samples": samples,
    }


def _place(group: Rewards, stored: Row, settings: RunSettings, kind: str) -> Row:
    """The samples of the prompt of a row, and its advantage; `stored` has all columns of the row."""
    [advantage], formula = _advantages([stored], {stored["group_id"]: group}, settings, kind)
    return {
        "rows": [number for number, _ in group],
        "rewards": [reward for _, reward in group],
        "mean_reward": _mean(group),
        "advantage": advantage,
        "formula": formula,
    }


def _mean(scored: Rewards) -> float | None:
    known = [reward for _, reward in scored if reward is not None]
    return sum(known) / len(known) if known else None


def _advantages(
    rows: Sequence[Row], groups: Mapping[str, Rewards], settings: RunSettings, kind: str
) -> tuple[list[float | None], str]:
    """The advantages of samples, and their formula; None and "" for a file that was not trained on.

    They are what the loss saw, if the file has it. Else they are computed, for which `groups` has the rewards of all
    samples of each prompt.
    """
    if kind != "train":
        return [None] * len(rows), ""
    if all(COLUMN in row for row in rows):
        return stored_advantages([row[COLUMN] for row in rows])
    found, formulas = dict[int, float | None](), set[str]()
    for group in groups.values():
        advantages, formula = group_advantages([reward for _, reward in group], settings)
        found |= zip((number for number, _ in group), advantages, strict=True)
        formulas.add(formula)
    formula = max(formulas, default="")  # "" if nothing of a group has a reward
    return [found[row["file_row_number"]] for row in rows], f"{formula}, from the stored rewards" if formula else ""
