"""One real query through the environment that the run names: the question of its first training prompt."""

from __future__ import annotations

import time

import pyarrow.parquet as pq

from verl.agent.environment import Environment, InspectedEnvironment
from verl.config import Config
from verl.data.files import file_list
from verl.errors import DataError, VerlError
from verl.event_loop import run_to_end
from verl.tracking.trajectory_rows import question_of
from verl.trainer.preflight.finding import Finding, judge


def check_environment(config: Config, environment: Environment) -> Finding:
    """Asks it, and closes it. The prompt files were checked."""
    return run_to_end(_check(config, environment))


def first_question(config: Config) -> str:
    """Of the first training row; where the row has none, the last line of its prompt. Raises DataError."""
    path, key = file_list(config.data.train_files)[0], config.data.prompt_key
    row = next(pq.ParquetFile(path).iter_batches(batch_size=1)).to_pylist()[0]
    question = question_of(row) or (_last_line(row[key][-1]["content"]) if row[key] else None)
    if not question:
        raise DataError(f"{path}: row 0 has neither a question nor a prompt in column {key!r}")
    return question


async def _check(config: Config, environment: Environment) -> Finding:
    try:
        await environment.check()
        if not isinstance(environment, InspectedEnvironment):
            return Finding("ok", "environment", "answers")
        query = first_question(config)
        started = time.perf_counter()
        titles = await environment.probe(query)
        milliseconds = 1000 * (time.perf_counter() - started)
    except VerlError as error:
        return Finding("FAIL", "environment", str(error))
    finally:
        await environment.close()
    if titles is None:
        return Finding("ok", "environment", "has no tool in this run")
    found = f"{len(titles)} passages for {query!r} in {milliseconds:.0f} ms" + _first(titles)
    return judge(bool(titles), "environment", found, "see that the retriever has the corpus you mean", "warn")


def _first(titles: list[str]) -> str:
    return f", the first is {titles[0]!r}" if titles else ""


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
