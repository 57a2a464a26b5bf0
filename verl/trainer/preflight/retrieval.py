"""One real query through the environment that the run names: the question of its first training prompt."""

from __future__ import annotations

import time

from verl.agent.environment import Environment, Outcome
from verl.by_name import dotted_name, in_words
from verl.config import Config
from verl.data.files import file_list
from verl.errors import ConfigError, DataError, VerlError
from verl.event_loop import run_to_end
from verl.protocol import Prompt
from verl.tracking.trajectory_rows import question_of
from verl.trainer.preflight.finding import Finding, judge
from verl.trainer.preflight.rows import first_row


def check_environment(config: Config, environment: Environment) -> Finding:
    """Sends the query, and closes the environment. The prompt files must have been checked."""
    return run_to_end(_check(config, environment))


def first_question(config: Config) -> str:
    """The question of the first training row, or the last line of its prompt. Raises DataError."""
    key, row = config.data.prompt_key, first_row(config)
    question = question_of(row) or (_last_line(row[key][-1]["content"]) if row[key] else None)
    if not question:
        raise DataError(
            f"{file_list(config.data.train_files)[0]}: row 0 has neither a question nor a prompt in column {key!r}"
        )
    return question


async def try_step(config: Config, environment: Environment) -> None:
    """Call `step` with the environment's example turn, in which no tool may be used. Raises ConfigError when that fails
    or returns no Outcome.
    """
    row = first_row(config)
    try:
        outcome = await environment.step(Prompt((), row["data_source"], row), environment.example_turn, False)
    except VerlError:
        raise
    except Exception as error:
        raise ConfigError(f"step of {dotted_name(environment)} raised {in_words(error)}") from error
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"step of {dotted_name(environment)} gave {outcome!r}, which is not an Outcome")


async def _check(config: Config, environment: Environment) -> Finding:
    try:
        await environment.check()
        await try_step(config, environment)
        query = first_question(config)
        started = time.perf_counter()
        titles = await environment.probe(query)
        milliseconds = 1000 * (time.perf_counter() - started)
    except VerlError as error:
        return Finding("FAIL", "environment", str(error))
    finally:
        await environment.close()
    if titles is None:
        return Finding("ok", "environment", "answers a turn; it has no tool to try in this run")
    found = f"{len(titles)} passages for {query!r} in {milliseconds:.0f} ms" + _first(titles)
    return judge(bool(titles), "environment", found, "check that the retriever has the corpus that you want", "warn")


def _first(titles: list[str]) -> str:
    return f", the first is {titles[0]!r}" if titles else ""


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
