"""How episodes are interrupted, and what happens to the answers that they were waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

Task = asyncio.Future[Any]


class Interrupted(Exception):
    """The episode is paused."""


class OpenAnswers:
    """Pending answers of the environment to interrupted episodes; used on one event loop.

    A later request with an equal key takes one of them, and each is taken once: an environment keeps no state of an
    episode. An answer that nobody has taken by the second interruption after its own is cancelled.
    """

    def __init__(self) -> None:
        self._latest: dict[Hashable, list[Task]] = {}
        self._earlier: dict[Hashable, list[Task]] = {}

    def keep(self, key: Hashable, answer: Task) -> None:
        answer.add_done_callback(lambda one: one.cancelled() or one.exception())  # of which nobody may ever hear
        self._latest.setdefault(key, []).append(answer)

    def take(self, key: Hashable) -> Task | None:
        for kept in (self._earlier, self._latest):
            if answers := kept.get(key):
                return answers.pop(0)
        return None

    def grow_older(self) -> None:
        """An interruption begins: cancel the answers that were kept before the previous one."""
        self._cancel(self._earlier)
        self._earlier, self._latest = self._latest, {}

    def forget(self) -> None:
        """Cancel all answers."""
        self._cancel(self._earlier)
        self._cancel(self._latest)

    def _cancel(self, kept: dict[Hashable, list[Task]]) -> None:
        for answers in kept.values():
            for answer in answers:
                answer.cancel()
        kept.clear()


class Pause:
    """Interrupts all episodes that it was passed to, once it has `begun`; used on one event loop.

    Episodes stop waiting for the environment; its answers are kept in `answers` for the episodes that resume with
    another pause. The caller of `begin` must also stop the turns that are being sampled.
    """

    def __init__(self, answers: OpenAnswers | None = None) -> None:
        self.has_begun = False
        self._answers = answers or OpenAnswers()
        self._waiting: set[Task] = set()

    def begin(self) -> None:
        self.has_begun = True
        self._answers.grow_older()
        for task in self._waiting:
            task.cancel()

    def check(self) -> None:
        """Raise Interrupted if it has begun."""
        if self.has_begun:
            raise Interrupted

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Context in which a pause ends the wait for something that can be requested again. Raises Interrupted."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._waiting.discard(task)

    async def answer(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `ask`, or of the same request by an episode that was interrupted. Raises Interrupted."""
        self.check()
        asked = self._answers.take(key) or asyncio.ensure_future(ask())
        try:
            with self.ends():
                return await asyncio.shield(asked)
        except Interrupted:
            self._answers.keep(key, asked)
            raise
        except asyncio.CancelledError:
            asked.cancel()
            await asyncio.wait([asked])
            raise
