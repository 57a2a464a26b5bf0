"""A judge's verdicts on answers that exist already: requested after the episodes, as often as needed.

An answer without a verdict is not generated again: only the missing verdict is requested, in this run and the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from long_task import Progress
from search_r1.evaluation.records import Record
from search_r1.evaluation.store import Store
from search_r1.rewards.component import BatchedComponent, Value
from search_r1.rewards.reading import Reading
from verl.errors import RewardUnavailable
from verl.process.startup import tell

_PART = 256  # verdicts in a part: what a killed run loses at most


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
            verdicts = await judge.measure([_reading(record) for record in part])
            if all(isinstance(verdict, RewardUnavailable) for verdict in verdicts):
                store.add_verdicts([_judged(record, verdicts[-1]) for record in records[start:]])
                return
            store.add_verdicts([_judged(record, verdict) for record, verdict in zip(part, verdicts, strict=True)])
            progress.update(len(part))


def _reading(record: Record) -> Reading:
    """What a judge looks at."""
    return Reading((), record.answer, tuple(record.golden_answers), record.question)


def _judged(record: Record, verdict: Value) -> Record:
    if isinstance(verdict, RewardUnavailable):
        return replace(record, failure=str(verdict))
    return replace(record, failure=None, metrics=record.metrics | {"judge": verdict})
