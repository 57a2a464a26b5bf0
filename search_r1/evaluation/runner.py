"""Runs the remaining questions of an evaluation, many at once, and stores what is finished."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from long_task import Progress
from search_r1.evaluation.questions import Question
from search_r1.evaluation.store import Measurer, Scored, Store
from verl.process.event_loop import end_all
from verl.process.startup import tell
from verl.protocol import Status, Trajectory
from verl.tracking.trajectory_store import Decode


class Player(Protocol):
    """See `search_r1.evaluation.methods.Method`."""

    async def play(self, question: Question, seed: int | None = None) -> Trajectory: ...


@dataclass(frozen=True)
class Pace:
    """`concurrency` questions at once; `max_redraws` more attempts at a failed one; `part_size` questions in a part."""

    concurrency: int = 64
    max_redraws: int = 2
    part_size: int = 64


def unfinished(questions: Sequence[Question], store: Store) -> list[Question]:
    """The questions without a finished episode."""
    records = store.records()
    return [question for question in questions if question.key not in records or not records[question.key].played]


class Runner:
    """`seed` makes sampling reproducible: each attempt at a question has its own seed."""

    def __init__(
        self, method: Player, measurer: Measurer, store: Store, decode: Decode, pace: Pace, seed: int | None = None
    ) -> None:
        self._method, self._measurer, self._store, self._decode = method, measurer, store, decode
        self._pace, self._seed = pace, seed
        self._done: list[Scored] = []
        self._places = asyncio.Semaphore(pace.concurrency)

    async def run(self, questions: Sequence[Question]) -> None:
        """Ask the unfinished questions. Finished ones are kept, however the run ends."""
        left = unfinished(questions, self._store)
        tell(f"asking {len(left)} of {len(questions)} questions, {self._pace.concurrency} at a time")
        with Progress("questions", len(questions), len(questions) - len(left)) as progress:
            tasks = [asyncio.create_task(self._play(question)) for question in left]
            try:
                # Stored in parts: a process that is killed loses at most one part of the finished questions.
                for finished in asyncio.as_completed(tasks):
                    self._done.append(await finished)
                    progress.update()
                    if len(self._done) >= self._pace.part_size:
                        self._keep()
            finally:
                await end_all(tasks)
                self._keep()

    async def _play(self, question: Question) -> Scored:
        async with self._places:
            for attempt in range(self._pace.max_redraws + 1):
                started = time.perf_counter()
                trajectory = await self._method.play(question, self._seed_of(question, attempt))
                seconds = time.perf_counter() - started
                if trajectory.status is not Status.FAILED:
                    break
        return Scored(trajectory, seconds)

    def _seed_of(self, question: Question, attempt: int) -> int | None:
        """A question draws the same whichever others are asked."""
        if self._seed is None:
            return None
        name = f"{self._seed}/{question.key}/{attempt}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

    def _keep(self) -> None:
        episodes, self._done = self._done, []
        if episodes:
            records = self._measurer.measure(episodes)
            self._store.add(records, [episode.trajectory for episode in episodes], self._decode)
