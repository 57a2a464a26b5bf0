"""One episode: policy turns and environment turns in alternation, in token ids only.

The context is append-only. What the policy saw when it sampled a turn is exactly what a loss sees before that turn:
nothing is truncated on the left, and ids are never decoded and encoded again. Where the environment replaces the
context (`Outcome.context`), a further sequence begins; all of this then holds for that sequence.

A `Pause` interrupts an episode, even in the middle of a turn; the episode resumes later from its ids, possibly in
another process and under other weights. A request that is pending in the environment continues meanwhile, for an
episode that resumes in the same process. `Trajectory.open_turn` says where the episode stopped: INTERRUPTED if the
policy has not finished its latest turn; the generation's `finish_reason` if the turn is finished but the environment
has not answered it. An episode with state resumes only where its state is kept; elsewhere its rollout begins again.

With a `Compaction`, a reply that would make the context longer than its limit is held back. The policy is asked for a
summary instead, which is a turn of its own, and a further sequence begins with the prompt, the summary and the reply.
The event of the turn before the summary keeps the reply, so this too can be interrupted anywhere and resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl.agent.environment import (
    INTERRUPTED,
    Environment,
    Episode,
    Outcome,
    Sampler,
    Sampling,
    Turn,
    checked_outcome,
)
from verl.agent.messages import encode_messages
from verl.agent.pause import Interrupted, OpenEpisode, Pause
from verl.agent.text import decode_turn, encode_outside, exceeds, reply_ids, whole_characters
from verl.errors import ConfigError, DataError, EnvironmentUnavailable, RolloutError, translated
from verl.process.by_name import dotted_name
from verl.protocol import IS_SUMMARY, WAITING, Prompt, Segment, Source, Status, Trajectory, searches_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compaction:
    """When the context is replaced by a summary: where it would have more than `at` tokens, up to `max_times` times.

    A summary has up to `max_length` tokens. `request` asks for it; None: that of the environment.
    """

    at: int
    max_times: int
    max_length: int
    request: str | None = None


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode, in turns, tokens and seconds."""

    max_turns: int  # turns in which tools may be used; one last turn without tools follows. Summaries do not count
    max_response_length: int  # sampled tokens of one turn
    max_context_length: int  # tokens in context when a turn starts
    max_model_length: int | None = None  # the sampler's window; None: max_context_length + max_response_length
    step_timeout_s: float | None = None  # of one answer of the environment; None: no limit
    compaction: Compaction | None = None

    @classmethod
    def from_config(cls, config: Config) -> EpisodeLimits:
        """The limits that `config` sets. Without `do_search` an episode is one turn without tools."""
        data, rollout, agent = config.data, config.actor_rollout_ref.rollout, config.agent
        compaction = None
        if agent.compact_at is not None:
            # A summary may be as long as any turn, if nothing else is set.
            most = agent.max_summary_length or data.max_response_length
            compaction = Compaction(agent.compact_at, agent.max_compactions, most, agent.summary_request)
        return cls(
            max_turns=config.max_turns if config.do_search else 0,
            max_response_length=data.max_response_length,
            max_context_length=data.max_prompt_length,
            max_model_length=rollout.prompt_length + rollout.response_length,
            step_timeout_s=agent.step_timeout_s,
            compaction=compaction,
        )

    @property
    def window(self) -> int:
        """No sequence is longer than this many tokens."""
        return self.max_model_length or self.max_context_length + self.max_response_length


class SelfPlayedEpisode(Episode):
    """An episode that asks for the policy's turns by itself, instead of answering them."""

    @abstractmethod
    async def play(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        limits: EpisodeLimits,
        seed: int | None,
        pause: Pause,
    ) -> Status:
        """Play to the end, or after an interruption go on; returns how the episode ended.

        However this ends, `trajectory` has in the end all that was sampled. Raises `Interrupted` once `pause` begins,
        when nothing of this episode is being sampled any more, and `EnvironmentUnavailable` when infrastructure fails.
        """


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

    A turn that the environment had not answered at the pause is sent to it again, unless `pause` kept the answer. An
    episode with state that `pause` does not keep is begun again from its prompt. What is opened is closed before this
    returns or raises, except for the state of an interrupted episode, which is kept in the `OpenAnswers` of `pause`.

    `sampling` gives the distribution; its `max_tokens`, `stop` and `seed` are set here for each turn. With a `seed`,
    turn k samples with `turn_seed(seed, k)`; the rest of an interrupted turn uses another seed.
    `EnvironmentUnavailable` ends the episode `FAILED` with the error's text in `failure`; the sampler's errors
    propagate. Raises `RolloutError` if a context does not start with the previous one, and `ConfigError` for an answer
    of the environment that cannot be used.
    """
    pause, opened = pause or Pause(), None
    # An episode with state continues only with its own state.
    if begun is not None and begun.episode_key is not None:
        opened, begun.episode_key = pause.resume(begun.episode_key), None
        if opened is None:
            log.info("group %s: the state of an interrupted episode is not here; the rollout begins again", group_id)
            begun = None
    trajectory = begun or Trajectory(group_id, prompt, [Segment(Source.PROMPT, tuple(prompt.ids))])
    try:
        if opened is None:
            with pause.ends():
                opened = await OpenEpisode.begin(environment, prompt, limits.step_timeout_s)
        if isinstance(opened.episode, SelfPlayedEpisode):
            playing = opened.episode.play(trajectory, sampler, tokenizer, sampling, limits, seed, pause)
        else:
            playing = _Episode(
                trajectory, sampler, environment, tokenizer, sampling, limits, seed, pause, opened
            ).play()
        trajectory.status = await playing
    except Interrupted:
        if opened is not None and opened.has_state and trajectory.num_turns:
            trajectory.episode_key, opened = pause.keep(opened), None
        return trajectory
    except EnvironmentUnavailable as error:
        trajectory.status, trajectory.failure = Status.FAILED, whole_characters(str(error))
    finally:
        if opened is not None:
            await opened.close()
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
    opened: OpenEpisode
    context: list[int] = field(default_factory=list)  # what the latest turn of this sequence was sampled from
    turn_ids: tuple[int, ...] = ()  # the ids of the latest turn
    num_summaries: int = 0  # that were asked for

    async def play(self) -> Status:
        limits = self.limits
        self.num_summaries = sum(WAITING in event for event in self.trajectory.events)
        for turn in itertools.count(self._next_turn()):
            # The policy's turn, which a resumed episode may have sampled already, in whole or in part.
            self._extend_context()
            compaction = limits.compaction if self._reply_that_waits(turn) is not None else None
            most = limits.max_response_length if compaction is None else compaction.max_length
            max_tokens = min(most, limits.window - len(self.context))
            if len(self.context) > limits.max_context_length or max_tokens <= 0:
                return Status.LENGTH_LIMIT
            environment = self.environment
            stops = environment.stop_strings if compaction is None else environment.summary_stop_strings
            if self.trajectory.open_turn in (None, INTERRUPTED):
                await self._sample(turn, max_tokens, stops)
            reason = self.trajectory.open_turn
            text = decode_turn(self.tokenizer, self.turn_ids)
            sampled = Turn(text, self.turn_ids, tuple(self.context), finished=reason == "stop")
            ended_by_eos = reason == "stop" and not any(stop in text for stop in stops)

            # What the policy reads next enters the record only if another turn can start after it.
            if compaction is not None:
                segment = await self._go_on(turn, sampled)
            else:
                # A turn that the window cut off gets no observation: there is no room for it.
                last = turn - self.num_summaries == limits.max_turns
                cut = reason == "length" and max_tokens < limits.max_response_length
                outcome = await self._ask(turn, sampled, tools_allowed=not (last or cut))
                if outcome.done:
                    return outcome.status
                if cut:
                    return Status.LENGTH_LIMIT
                if last:
                    return Status.TURN_LIMIT
                segment = await self._reply(outcome, ended_by_eos)
                if self._is_long(segment):
                    segment = await self._request(sampled, outcome, ended_by_eos) or segment
            if segment is None:
                self.trajectory.events[-1]["observation_dropped"] = True
                return Status.LENGTH_LIMIT
            if segment.source is Source.CONTEXT:
                self.context = []
            self._append(segment)
            self.trajectory.open_turn, self.turn_ids = None, ()
        raise AssertionError("unreachable: the last turn returns")

    def _reply_that_waits(self, turn: int) -> str | None:
        """The reply that was held back, if `turn` is a summary."""
        events = self.trajectory.events
        return events[turn - 1].get(WAITING) if turn and self.limits.compaction is not None else None

    def _is_long(self, segment: Segment | None) -> bool:
        """Whether a summary is due before the policy reads `segment` (None: there is no room for it at all)."""
        compaction = self.limits.compaction
        if compaction is None or self.num_summaries == compaction.max_times:
            return False
        kept = 0 if segment is None or segment.source is Source.CONTEXT else len(self.context) + len(self.turn_ids)
        return segment is None or kept + len(segment.ids) > compaction.at

    async def _request(self, sampled: Turn, outcome: Outcome, ended_by_eos: bool) -> Segment | None:
        """The request for a summary in place of the reply of `outcome`; None if none can be asked for."""
        assert self.limits.compaction is not None
        request = self.limits.compaction.request or self.environment.summary_request
        asked = self.opened.episode.ask_for_summary(sampled, outcome, request)
        segment = None
        if asked is not None:
            segment = await self._reply(checked_outcome(asked, self.environment), ended_by_eos)
        if segment is not None:
            self.trajectory.events[-1][WAITING] = whole_characters(outcome.reply)
            self.num_summaries += 1
        return segment

    async def _go_on(self, turn: int, summary: Turn) -> Segment | None:
        """What the sequence after a summary begins with; None if it is too long."""
        given = self.opened.episode.go_on_from(summary, self._reply_that_waits(turn) or "")
        outcome = checked_outcome(given, self.environment)
        outcome = replace(outcome, valid=outcome.valid and summary.finished)
        self._tell(turn, summary, outcome)[IS_SUMMARY] = True
        if outcome.context_ids is None:
            if await exceeds(self.tokenizer, outcome.reply, self._room):
                return None
            told = encode_outside(self.tokenizer, outcome.reply, self.environment.tags)
            outcome = replace(outcome, reply="", context_ids=(*self.trajectory.prompt.ids, *told))
        return await self._reply(outcome, ended_by_eos=False)

    def _next_turn(self) -> int:
        """The number of the turn to play: the open one of an interrupted episode, else the one after its latest."""
        trajectory = self.trajectory
        if trajectory.open_turn is None:
            return trajectory.num_turns
        self.turn_ids = trajectory.segments[-1].ids
        return trajectory.num_turns - 1

    def _extend_context(self) -> None:
        """Check, on the record itself, that this turn's context begins with the previous turn's of its sequence."""
        segments = self.trajectory.segments
        # The sequence of this turn begins with its context, the first one with the prompt.
        start = len(segments) - 1
        while start and segments[start].source is not Source.CONTEXT:
            start -= 1
        ids = [token for segment in segments[start:] for token in segment.ids]
        # What is sampled of this turn already stands at the end, and is not what it was sampled from.
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
        # After an interruption the engine continues behind the tokens that it had sampled, with what is left to sample.
        sampling = replace(
            self.sampling,
            max_tokens=max_tokens - len(begun),
            stop=stops,
            stop_token_ids=self.environment.stop_token_ids,
            seed=None if self.seed is None else turn_seed(self.seed, turn, len(begun)),
            num_begun=len(begun),
        )
        context = [*self.context, *begun] if begun else self.context
        generation = await self.sampler.generate(context, sampling)
        # All of it is in the record before an interruption is raised, so that the episode can go on from there.
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

    async def _ask(self, turn: int, sampled: Turn, tools_allowed: bool) -> Outcome:
        self._tell(turn, sampled)
        question = (self.trajectory.group_id, self.trajectory.prompt.ids, sampled.text, tools_allowed)
        answer = await self.pause.answer(question, self.opened, sampled, tools_allowed)
        outcome = checked_outcome(answer, self.environment)
        event = self._tell(turn, sampled, outcome)
        if outcome.action == "search" and tools_allowed:
            self.trajectory.num_searches += max(1, len(searches_of(event)))
        return outcome

    def _tell(self, turn: int, sampled: Turn, outcome: Outcome | None = None) -> dict[str, Any]:
        """The event of the turn, which enters the record; without an `outcome`, as long as there is none."""
        event: dict[str, Any] = {"turn": turn, "text": sampled.text}
        if outcome is not None:
            event |= self._storable(outcome.event) | {"action": outcome.action, "valid": outcome.valid}
            self.trajectory.num_valid_actions += outcome.valid
        events = self.trajectory.events
        if events and events[-1]["turn"] == turn:
            events.pop()
        events.append(event)
        return event

    def _storable(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """`event` as it is if JSON has all of it; otherwise with a text in place of each value that JSON lacks."""
        try:
            json.dumps(event, allow_nan=False)
            return dict(event)
        except (TypeError, ValueError, RecursionError):
            pass
        try:
            plain: dict[str, Any] = _plain(event)
            return plain
        except RecursionError as error:
            raise ConfigError(f"step of {self.opened.name} gave an event that contains itself") from error

    async def _reply(self, outcome: Outcome, ended_by_eos: bool) -> Segment | None:
        """What the policy reads next; None if no turn can start after it."""
        tokenizer, tags, room = self.tokenizer, self.environment.tags, self._room
        # A new context replaces all before it, so that it may take all of the room.
        if outcome.context_ids is not None:
            return Segment(Source.CONTEXT, outcome.context_ids) if len(outcome.context_ids) <= room else None
        if outcome.context is not None:
            text = "\n".join(message["content"] for message in outcome.context)
            if await exceeds(tokenizer, text, room):
                return None
            what = f"the context that {dotted_name(self.environment)} gave"
            with translated(DataError, lambda error: ConfigError(f"{what} cannot be written: {error}")):
                ids = tuple(encode_messages(tokenizer, outcome.context, tags))
            if not ids:
                raise ConfigError(f"{what} has no token in it")
            return Segment(Source.CONTEXT, ids) if len(ids) <= room else None
        # A reply stands behind what the policy has read and written in this sequence.
        room -= len(self.context) + len(self.turn_ids)
        if outcome.reply_ids is not None:
            return Segment(Source.ENVIRONMENT, outcome.reply_ids) if len(outcome.reply_ids) <= room else None
        if await exceeds(tokenizer, outcome.reply.strip(), room):
            return None
        ids = reply_ids(tokenizer, self.turn_ids, outcome.reply, ended_by_eos, tags)
        return Segment(Source.ENVIRONMENT, ids) if len(ids) <= room else None

    @property
    def _room(self) -> int:
        """The most tokens of a context after which another turn can start."""
        return min(self.limits.max_context_length, self.limits.window - 1)

    def _append(self, segment: Segment) -> None:
        if segment.ids:
            self.trajectory.segments.append(segment)


def _plain(value: Any) -> Any:
    """`value` as JSON has it; what it lacks (NaN, say) as text, and arrays as lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
