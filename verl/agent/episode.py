"""One episode: policy turns and environment turns in alternation, in token ids only.

The context is append-only. What the policy saw when it sampled a turn is exactly what a loss sees before that turn:
nothing is truncated on the left, and ids are never decoded and encoded again.

A `Pause` interrupts an episode, even in the middle of a turn; the episode resumes later from its ids, possibly in
another process and under other weights. A request that is pending in the environment continues meanwhile, for an
episode that resumes in the same process. `Trajectory.open_turn` says where the episode stopped: INTERRUPTED if the
policy has not finished its latest turn; the generation's `finish_reason` if the turn is finished but the environment
has not answered it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.agent.environment import INTERRUPTED, Environment, Outcome, Sampler, Sampling
from verl.agent.text import decode_turn, reply_ids, whole_characters
from verl.errors import ConfigError, EnvironmentUnavailable, RolloutError
from verl.process.by_name import dotted_name
from verl.protocol import Prompt, Segment, Source, Status, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

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


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode, in turns and tokens."""

    max_turns: int  # turns in which tools may be used; one last turn without tools follows
    max_response_length: int  # sampled tokens of one turn
    max_context_length: int  # tokens in context when a turn starts
    max_model_length: int | None = None  # the sampler's window; None: max_context_length + max_response_length

    @classmethod
    def from_config(cls, config: Config) -> EpisodeLimits:
        """The limits that `config` sets. Without `do_search` an episode is one turn without tools."""
        data, rollout = config.data, config.actor_rollout_ref.rollout
        return cls(
            max_turns=config.max_turns if config.do_search else 0,
            max_response_length=data.max_response_length,
            max_context_length=data.max_prompt_length,
            max_model_length=rollout.prompt_length + rollout.response_length,
        )

    @property
    def window(self) -> int:
        """No sequence is longer than this many tokens."""
        return self.max_model_length or self.max_context_length + self.max_response_length


async def run_episode(
    prompt: Prompt,
    group_id: str,
    sampler: Sampler,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    limits: EpisodeLimits,
    seed: int | None,
    begun: Trajectory | None = None,
    pause: Pause | None = None,
) -> Trajectory:
    """Play one episode to its end, or resume one that was `begun`; if `pause` interrupts it, it has no `status`.

    A turn that the environment had not answered at the pause is sent to it again, unless `pause` kept the answer.

    `sampling` gives the distribution; its `max_tokens`, `stop` and `seed` are set here for each turn. With a `seed`,
    turn k samples with `turn_seed(seed, k)`; the rest of an interrupted turn uses another seed.
    `EnvironmentUnavailable` ends the episode `FAILED` with the error's text in `failure`; the sampler's errors
    propagate. Raises `RolloutError` if a context does not start with the previous one.
    """
    trajectory = begun or Trajectory(group_id, prompt, [Segment(Source.PROMPT, tuple(prompt.ids))])
    episode = _Episode(trajectory, sampler, environment, tokenizer, sampling, limits, seed, pause or Pause())
    try:
        trajectory.status = await episode.play()
    except Interrupted:
        return trajectory
    except EnvironmentUnavailable as error:
        trajectory.status, trajectory.failure = Status.FAILED, whole_characters(str(error))
    trajectory.open_turn = None
    return trajectory


def turn_seed(seed: int, turn: int, num_begun: int = 0) -> int:
    """A seed in [0, 2^63) for one turn, or for the rest of it after its first `num_begun` ids: equal for equal
    arguments on any machine, unrelated otherwise."""
    name = f"{seed}/{turn}/{num_begun}" if num_begun else f"{seed}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


@dataclass
class _Episode:
    trajectory: Trajectory
    sampler: Sampler
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    limits: EpisodeLimits
    seed: int | None
    pause: Pause
    context: list[int] = field(default_factory=list)  # what the latest turn was sampled from
    turn_ids: tuple[int, ...] = ()  # the ids of the latest turn

    async def play(self) -> Status:
        limits = self.limits
        for turn in range(self._next_turn(), limits.max_turns + 1):
            # The policy's turn, which a resumed episode may have sampled already, in whole or in part.
            self._extend_context()
            max_tokens = min(limits.max_response_length, limits.window - len(self.context))
            if len(self.context) > limits.max_context_length or max_tokens <= 0:
                return Status.LENGTH_LIMIT
            stops = self.environment.stop_strings
            if self.trajectory.open_turn in (None, INTERRUPTED):
                await self._sample(turn, max_tokens, stops)

            # The environment's answer. A turn that the window cut off gets no observation: there is no room for it.
            last = turn == limits.max_turns
            reason = self.trajectory.open_turn
            cut = reason == "length" and max_tokens < limits.max_response_length
            text = decode_turn(self.tokenizer, self.turn_ids)
            outcome = await self._ask(turn, text, tools_allowed=not (last or cut))
            if outcome.done:
                return Status.ANSWERED
            if cut:
                return Status.LENGTH_LIMIT
            if last:
                return Status.TURN_LIMIT

            # Its observation enters the context only if another turn can start after it.
            ended_by_eos = reason == "stop" and not any(stop in text for stop in stops)
            ids = reply_ids(self.tokenizer, self.turn_ids, outcome.reply, ended_by_eos, self.environment.tags)
            length = len(self.trajectory.ids) + len(ids)
            if length > limits.max_context_length or length >= limits.window:
                self.trajectory.events[-1]["observation_dropped"] = True
                return Status.LENGTH_LIMIT
            self._append(Segment(Source.ENVIRONMENT, ids))
            self.trajectory.open_turn, self.turn_ids = None, ()
        raise AssertionError("unreachable: the last turn returns")

    def _next_turn(self) -> int:
        """The number of the turn to play: the open one of an interrupted episode, else the one after its latest."""
        trajectory = self.trajectory
        if trajectory.open_turn is None:
            return trajectory.num_turns
        self.turn_ids = trajectory.segments[-1].ids
        return trajectory.num_turns - 1

    def _extend_context(self) -> None:
        """Check, on the record itself, that this turn's context begins with the previous turn's."""
        ids = self.trajectory.ids
        context = ids[: len(ids) - len(self.turn_ids)]
        if context[: len(self.context)] != self.context:
            raise RolloutError(
                f"group {self.trajectory.group_id}: the context of turn {self.trajectory.num_turns} does not start "
                f"with the context of the turn before it; segments of a trajectory may only be appended"
            )
        self.context = context

    async def _sample(self, turn: int, max_tokens: int, stops: tuple[str, ...]) -> None:
        """Sample the turn, or what is left of it. Raises Interrupted."""
        self.pause.check()
        trajectory, begun = self.trajectory, self.turn_ids
        sampling = replace(
            self.sampling,
            max_tokens=max_tokens - len(begun),
            stop=stops,
            seed=None if self.seed is None else turn_seed(self.seed, turn, len(begun)),
            num_begun=len(begun),
        )
        context = [*self.context, *begun] if begun else self.context
        generation = await self.sampler.generate(context, sampling)
        ids, version = tuple(generation.ids), generation.weight_version
        sampled = Segment(Source.POLICY, ids, tuple(generation.log_probs), ((version, len(ids)),) if ids else ())
        if begun:
            trajectory.segments[-1] = trajectory.segments[-1].extended(sampled)
        else:
            self._append(sampled)
            trajectory.num_turns += 1
        self.turn_ids = (*begun, *ids)
        trajectory.open_turn, trajectory.weight_version = generation.finish_reason, version
        if generation.finish_reason == INTERRUPTED:
            raise Interrupted

    async def _ask(self, turn: int, text: str, tools_allowed: bool) -> Outcome:
        event: dict[str, Any] = {"turn": turn, "text": text}
        events = self.trajectory.events
        events[:] = [*(one for one in events if one.get("turn") != turn), event]
        prompt = self.trajectory.prompt
        question = (self.trajectory.group_id, prompt.ids, text, tools_allowed)
        outcome = await self.pause.answer(question, partial(self.environment.step, prompt, text, tools_allowed))
        if not isinstance(outcome, Outcome):
            raise ConfigError(f"step of {dotted_name(self.environment)} gave {outcome!r}, which is no Outcome")
        event |= outcome.event | {"action": outcome.action, "valid": outcome.valid}
        self.trajectory.num_valid_actions += outcome.valid
        self.trajectory.num_searches += outcome.action == "search" and tools_allowed
        return outcome

    def _append(self, segment: Segment) -> None:
        if segment.ids:
            self.trajectory.segments.append(segment)
