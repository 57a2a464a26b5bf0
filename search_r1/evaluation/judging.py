"""A judge's verdicts on answers that exist already: requested after the episodes, as often as needed.

An answer without a verdict is not generated again: only the missing verdict is requested, in this run and the next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from long_task import Progress
from search_r1.rewards.component import BatchedComponent, Value
from search_r1.rewards.judge import load_rubric, shipped_rubrics
from search_r1.rewards.reading import Reading
from verl.errors import RewardUnavailable
from verl.process.startup import tell

if TYPE_CHECKING:
    from search_r1.evaluation.store import Record, Store
    from search_r1.rewards.judge import Judge

_PART = 256  # verdicts in a part: what a killed run loses at most
_FLAGS = ("url", "model", "rubric", "api_key_env", "cache")
_HOW_IT_IS_ASKED = {"api_key_env", "cache", "concurrency", "timeout_s", "deadline_s", "retries"}


def unjudged(keys: Iterable[str], store: Store) -> list[Record]:
    """The records of finished episodes without a verdict."""
    records = store.records()
    found = (records[key] for key in keys if key in records)
    return [record for record in found if record.played and record.metrics.get("judge") is None]


async def judge_answers(judge: BatchedComponent, keys: Sequence[str], store: Store, max_redraws: int) -> None:
    """Have every answer judged. A missing verdict is requested `max_redraws` more times, then it is a failure.

    Raises `ConfigError` if the judge refuses everything; earlier verdicts are kept.
    """
    for _ in range(max_redraws + 1):
        missing = unjudged(keys, store)
        if missing:
            await _judge_once(judge, missing, store)


async def _judge_once(judge: BatchedComponent, records: Sequence[Record], store: Store) -> None:
    """A part without a single verdict ends the round: the judge is down, and would be waited for part by part."""
    tell(f"judging {len(records)} answers")
    with Progress("answers", len(records)) as progress:
        for start in range(0, len(records), _PART):
            part = records[start : start + _PART]
            readings = [Reading((), record.answer, tuple(record.golden_answers), record.question) for record in part]
            verdicts = await judge.measure(readings)
            if all(isinstance(verdict, RewardUnavailable) for verdict in verdicts):
                store.add_verdicts([_judged(record, verdicts[-1]) for record in records[start:]])
                return
            store.add_verdicts([_judged(record, verdict) for record, verdict in zip(part, verdicts, strict=True)])
            progress.update(len(part))


def _judged(record: Record, verdict: Value) -> Record:
    if isinstance(verdict, RewardUnavailable):
        return replace(record, failure=str(verdict))
    return replace(record, failure=None, metrics=record.metrics | {"judge": verdict})


# The flags of an evaluation's judge, which correspond to the options of the reward component `judge`.


def add_judge_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--judge_url", help="base URL of an OpenAI-compatible API (http://host:port/v1) whose model judges the answers")
    add("--judge_model", help="name of the judge's model at that API")
    rubrics = ", ".join(shipped_rubrics())
    add("--judge_rubric", help=f"grading rubric: {rubrics}, or the path of a text file (default: correctness)")
    add("--judge_api_key_env", metavar="NAME", help="environment variable with the judge's API key")
    add("--judge_cache", metavar="FILE", help="SQLite file of cached verdicts, which several evaluations may share")
    add(
        *("--judge_option", "--judge_options"),
        nargs="+",
        action="extend",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="further options from docs/judge.md, as JSON or text: max_tokens=1024 concurrency=8",
    )


def check_judge_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with status 2 for flags that contradict each other."""
    if bool(args.judge_url) != bool(args.judge_model):
        parser.error("--judge_url and --judge_model go together")
    if not args.judge_url and (args.judge_option or any(getattr(args, f"judge_{name}") for name in _FLAGS)):
        parser.error("the flags of a judge need --judge_url and --judge_model")
    for name, _ in args.judge_option:
        if name in _FLAGS:
            parser.error(f"--judge_option {name}: give it as --judge_{name}")


def make_judge(args: argparse.Namespace) -> Judge | None:
    """The judge of the flags, or None without `--judge_url`.

    Raises `ConfigError` for an invalid option, or if the API key is missing.
    """
    from search_r1.rewards.component import make_component
    from search_r1.rewards.judge import Judge

    if not args.judge_url:
        return None
    judge = make_component(f"{Judge.__module__}.{Judge.__qualname__}", _options(args))
    assert isinstance(judge, Judge)
    return judge


def judge_settings(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the judge's verdicts depend on. Raises `ConfigError` for an invalid rubric."""
    if not args.judge_url:
        return None
    options = {name: value for name, value in _options(args).items() if name not in _HOW_IT_IS_ASKED}
    rubric = load_rubric(options.get("rubric", "correctness"))
    fingerprint = hashlib.sha256(rubric.text.encode()).hexdigest()[:16]
    return options | {"rubric": {"name": rubric.name, "fingerprint": fingerprint}}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    flags = {name: getattr(args, f"judge_{name}") for name in _FLAGS}
    return {name: value for name, value in flags.items() if value is not None} | dict(args.judge_option)


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
