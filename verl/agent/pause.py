"""What outlives an interruption of an episode: a pending answer of the environment, and an episode with state.

A rollout that resumes in the same process gets them back. An answer of an environment without state can be requested
again anywhere. A state cannot: the trajectory has the `episode_key` of its own, and where nothing is kept under it, the
rollout begins again from its prompt. Keys are unique, so no rollout can continue with a state that is ahead of it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Awaitable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from verl.agent.environment import Environment, Episode, EpisodeWithoutState, Outcome, Turn
from verl.errors import ConfigError, EnvironmentUnavailable, RolloutError
from verl.process.by_name import dotted_name, in_words
from verl.process.event_loop import hear
from verl.protocol import Prompt

log = logging.getLogger(__name__)

Task = asyncio.Future[Any]
T = TypeVar("T")

CLOSE_S = 10.0
"""The most seconds that an episode gets to close, and the turn that is pending in it to end before."""


class Interrupted(Exception):
    """The episode is paused."""


async def limited(call: Awaitable[T], limit_s: float | None, what: str) -> T:
    """The result of a call of the environment. Raises `EnvironmentUnavailable` after `limit_s` seconds.

    A CancelledError that the call raises although nobody cancelled it becomes a `RolloutError`, since it would look
    like the end of the run.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await call
    except asyncio.CancelledError as error:
        # Somebody has cancelled this task since the call began.
        if task.cancelling() > before:
            raise
        raise RolloutError(f"{what} raised CancelledError, but nobody has cancelled it") from error
    except Exception as error:
        # The call's own error, unless time is up: then the error comes from being cut off.
        if not limit.expired():
            raise
        message = f"{what} did not return within {limit_s:g} s (agent.step_timeout_s)"
        raise EnvironmentUnavailable(message) from error


class OpenEpisode:
    """An episode that its environment has opened. It is closed exactly once, however often `close` is called.

    `pending` is the answer to its latest turn, while it is awaited.
    """

    # Those of this process, by the `id` of their episode. One that was left open, as by an event loop that ended, is
    # not kept here: Python may make the next episode in its place.
    _live: ClassVar[WeakValueDictionary[int, OpenEpisode]] = WeakValueDictionary()
    _closings: ClassVar[set[Task]] = set()  # the event loop alone would not keep them
    _blamed: ClassVar[set[str]] = set()  # classes whose failure to close has been logged

    def __init__(self, episode: Episode, limit_s: float | None) -> None:
        self.pending: Task | None = None
        self.episode, self._limit_s = episode, limit_s
        self._closing: Task | None = None
        self.has_state = not isinstance(episode, EpisodeWithoutState)
        if self.has_state:
            self._live[id(episode)] = self

    @classmethod
    async def begin(cls, environment: Environment, prompt: Prompt, limit_s: float | None) -> OpenEpisode:
        """Open an episode. Raises what `open` raises, and `ConfigError` if its result is no new Episode."""
        name = dotted_name(environment)
        episode = await limited(environment.open(prompt), limit_s, f"open of {name}")
        if not isinstance(episode, Episode):
            raise ConfigError(f"open of {name} gave {type(episode).__name__}, which is no Episode")
        if id(episode) in cls._live:
            raise ConfigError(
                f"open of {name} gave one {dotted_name(episode)} to two episodes at once; make a new one for each"
            )
        # From here on the episode counts as open, so that it has to be closed.
        opened = cls(episode, limit_s)
        if not inspect.iscoroutinefunction(episode.step):
            await opened.close()
            raise ConfigError(f"step of {dotted_name(episode)} is a plain function; write `async def step`")
        return opened

    async def answer(self, turn: Turn, tools_allowed: bool) -> Outcome:
        """The environment's answer to a turn."""
        return await limited(self.episode.answer(turn, tools_allowed), self._limit_s, f"step of {self.name}")

    @property
    def name(self) -> str:
        """The dotted name of the class that answers."""
        episode = self.episode
        return dotted_name(episode.environment if isinstance(episode, EpisodeWithoutState) else episode)

    async def close(self) -> None:
        """Close it, after its pending answer is cancelled; returns when that is done."""
        if self.has_state:
            await asyncio.wait([self.start_closing()])  # which continues if this is cancelled

    def start_closing(self) -> Task:
        """The task that closes it."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
            self._closings.add(self._closing)
            self._closing.add_done_callback(self._closings.discard)
        return self._closing

    async def _close(self) -> None:
        # The turn that is pending may still use the episode: it ends first.
        if self.pending is not None:
            _cancel(self.pending)
            await asyncio.wait([self.pending], timeout=CLOSE_S)
        try:
            async with asyncio.timeout(min(CLOSE_S, self._limit_s or CLOSE_S)):
                await self.episode.close()
        except (Exception, asyncio.CancelledError) as error:
            # Its rollout has ended in any case, so that a failure is only logged: once for each class.
            if self.name not in self._blamed:
                self._blamed.add(self.name)
                log.warning("close of %s raised %s; further ones are not reported", self.name, in_words(error))
        finally:
            self._live.pop(id(self.episode), None)


class OpenAnswers:
    """What interrupted episodes have left in this process: pending answers, and episodes with state; used on one event
    loop.

    A later request with an equal key takes one of the answers, and each is taken once: an environment keeps no state of
    an episode. An episode with state is kept under a key of its own. What nobody has taken by the second interruption
    after its own is cancelled, and closed.
    """

    def __init__(self) -> None:
        self._latest: dict[Hashable, list[Task | OpenEpisode]] = {}
        self._earlier: dict[Hashable, list[Task | OpenEpisode]] = {}
        self._closings: set[Task] = set()

    def keep(self, key: Hashable, left: Task | OpenEpisode) -> None:
        self._latest.setdefault(key, []).append(left)

    def take(self, key: Hashable) -> Any:
        """What was kept first under the key; None if nothing is left."""
        for kept in (self._earlier, self._latest):
            if left := kept.get(key):
                return left.pop(0)
        return None

    def grow_older(self) -> None:
        """An interruption begins: drop what was kept before the previous one."""
        self._drop(self._earlier)
        self._earlier, self._latest = self._latest, {}

    def forget(self) -> None:
        """Drop everything."""
        self._drop(self._earlier)
        self._drop(self._latest)

    async def closed(self) -> None:
        """Wait until the episodes that were dropped are closed."""
        if self._closings:
            await asyncio.wait(self._closings)

    def _drop(self, kept: dict[Hashable, list[Task | OpenEpisode]]) -> None:
        for left in [one for together in kept.values() for one in together]:
            if isinstance(left, OpenEpisode):
                closing = left.start_closing()
                self._closings.add(closing)
                closing.add_done_callback(self._closings.discard)
            else:
                _cancel(left)
        kept.clear()


class Pause:
    """Interrupts all episodes that it was passed to, once it has `begun`; used on one event loop.

    Episodes stop waiting for the environment; its answers, and their states, are kept in `answers` for the episodes
    that resume with another pause. The caller of `begin` must also stop the turns that are being sampled.
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

    async def answer(self, key: Hashable, opened: OpenEpisode, turn: Turn, tools_allowed: bool) -> Outcome:
        """The environment's answer to a turn, or to the same turn of an episode that was interrupted. Raises
        Interrupted.

        key: what an environment without state is asked.
        """
        self.check()
        # An answer that was awaited when the episode was interrupted is not asked for again.
        kept = opened.pending if opened.has_state else self._answers.take(key)
        asked = kept or asyncio.ensure_future(opened.answer(turn, tools_allowed))
        opened.pending = asked
        try:
            # A pause ends the wait only: the shield lets the answer go on.
            with self.ends():
                outcome: Outcome = await asyncio.shield(asked)
        except Interrupted:
            asked.add_done_callback(hear)
            if not opened.has_state:
                self._answers.keep(key, asked)
            raise
        except asyncio.CancelledError:
            # The rollout itself was cancelled: nobody will come for the answer.
            _cancel(asked)
            await asyncio.wait([asked], timeout=CLOSE_S)
            raise
        opened.pending = None
        return outcome

    def keep(self, opened: OpenEpisode) -> str:
        """Keep the state of an interrupted episode; returns its key."""
        key = uuid.uuid4().hex
        self._answers.keep(key, opened)
        return key

    def resume(self, key: str) -> OpenEpisode | None:
        """The episode with state that was kept under the key, if this process still has it."""
        opened: OpenEpisode | None = self._answers.take(key)
        return opened


def _cancel(answer: Task) -> None:
    answer.add_done_callback(hear)
    answer.cancel()
