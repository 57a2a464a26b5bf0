"""Stream one episode while it is played. The loop is that of training; its sampler and environment are observed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.transcript import chat_pieces, chat_reply, final_answer, read_turns
from search_r1.serve.parts import Part, TurnSplitter, merged
from verl.agent.chat import ChatEnvironment
from verl.agent.environment import (
    Episode,
    EpisodicEnvironment,
    Generation,
    Outcome,
    Sampling,
    StreamingSampler,
    Turn,
    checked_outcome,
    join_pieces,
)
from verl.agent.text import TurnDecoder, whole_characters
from verl.errors import ConfigError
from verl.process.by_name import dotted_name
from verl.protocol import Prompt, Status, searches_of, was_search

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from search_r1.llm_agent.grammar import Grammar
    from verl.agent.formats import Format


@dataclass(frozen=True)
class Search:
    """An executed query: the documents shown for it, and how long the search took."""

    query: str
    document_ids: tuple[str, ...]
    milliseconds: float


@dataclass(frozen=True)
class Finished:
    """How an episode ended. Lengths in tokens: of the prompt, the sampled turns, the environment's replies.

    What a further sequence begins with counts as none of them. `calls`: the tool calls of a chat model, in order, as
    their events are; None for a policy with tags.
    """

    status: Status
    answer: str | None
    failure: str | None
    searches: tuple[Search, ...]
    num_turns: int
    prompt_length: int
    sampled_length: int
    observed_length: int
    calls: tuple[Mapping[str, Any], ...] | None = None


async def stream_episode(
    agent: SearchAgent, prompt: Prompt, seed: int | None, timeout_s: float, max_tokens: int | None = None
) -> AsyncGenerator[Part | Finished, None]:
    """Yield the parts of an episode as they arrive, and finally how it ended.

    At most `max_tokens` tokens are sampled in all turns together. Closing it, or cancelling the task that waits for it,
    ends any running sampling and search. Raises what `SearchAgent.play` raises, and `TimeoutError`.
    """
    parts: asyncio.Queue[Part | None] = asyncio.Queue()
    followed = _Followed(agent, parts.put_nowait, max_tokens)
    playing = asyncio.create_task(asyncio.wait_for(followed.play(prompt, seed), timeout_s))
    playing.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
        yield playing.result()
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


class _TaggedTurn:
    """A turn with tags that is still being sampled, from token ids to parts."""

    def __init__(self, grammar: Grammar, tokenizer: PreTrainedTokenizerBase) -> None:
        self._splitter, self._decoder = TurnSplitter(grammar), TurnDecoder(tokenizer)

    def feed(self, ids: Sequence[int]) -> list[Part]:
        """The parts that are certain after the next `ids` of the turn."""
        return self._splitter.feed(self._decoder.feed(ids))

    def end(self, event: Mapping[str, Any]) -> list[Part]:
        """The rest of the turn, of which the environment has made `event`, with its action."""
        rest = self._splitter.feed(self._decoder.end())
        is_answer = event.get("action") == "answer"
        return [*rest, *(self._splitter.end_with_answer() if is_answer else self._splitter.end())]


class _ChatTurn:
    """A turn of a chat model that is still being sampled, from token ids to parts.

    Thinking is given as it comes. Whether other text is the answer, and where the calls are, is known at the end.
    """

    def __init__(self, format: Format, tokenizer: PreTrainedTokenizerBase) -> None:
        self._format, self._tokenizer, self._decoder = format, tokenizer, TurnDecoder(tokenizer)
        self._ids: list[int] = []
        self._is_thinking, self._is_sure = format.prompt_thinks, True  # that what was said so far is thinking, or blank
        self._waiting, self._num_given = "", 0  # text; characters

    def feed(self, ids: Sequence[int]) -> list[Part]:
        """The thinking in the next `ids` of the turn."""
        thought = ""
        opening, closing = self._format.think_ids or (None, None)
        for token in ids:
            # Once something else than thinking was said, or the turn is over, the rest waits for `end`.
            self._ids.append(token)
            if not self._is_sure or token in self._format.stop_token_ids:
                self._is_sure = False
                continue
            self._waiting += self._decoder.feed([token])
            if token == opening:
                self._is_thinking = True
            # White space is held back until it is known whether thinking follows; the closing tag ends what is sure.
            if self._is_thinking:
                thought, self._waiting = thought + self._waiting, ""
                self._is_sure = token != closing
            else:
                self._is_sure = not self._waiting.strip()
        self._num_given += len(thought)
        return [Part("think", thought)] if thought else []

    def end(self, event: Mapping[str, Any]) -> list[Part]:
        """The rest of the turn, of which the environment has made `event`, with its action."""
        parts, given = [], self._num_given
        for kind, text in chat_pieces(self._tokenizer, self._ids, event):
            parts.append(Part(kind, text[given:]))
            given = max(0, given - len(text))
        return merged(parts)


class _BudgetSpent(Exception):
    """As many tokens were sampled as the caller allows."""


@dataclass(frozen=True)
class _FollowedEpisode(Episode):
    """An episode whose answers are reported as they come."""

    episode: Episode
    answered: Callable[[Outcome], Outcome]
    asked: Callable[[Outcome | None, str], Outcome | None]
    summed_up: Callable[[Outcome], Outcome]

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        return self.answered(await self.episode.step(text, tools_allowed))

    async def answer(self, turn: Turn, tools_allowed: bool) -> Outcome:
        return self.answered(await self.episode.answer(turn, tools_allowed))

    def ask_for_summary(self, turn: Turn, outcome: Outcome, request: str) -> Outcome | None:
        return self.asked(self.episode.ask_for_summary(turn, outcome, request), request)

    def go_on_from(self, summary: Turn, reply: str) -> Outcome:
        return self.summed_up(self.episode.go_on_from(summary, reply))

    async def close(self) -> None:
        await self.episode.close()


class _Followed(EpisodicEnvironment):
    """The sampler and the environment of one episode: both are the agent's, and every part is reported as it comes."""

    def __init__(self, agent: SearchAgent, tell: Callable[[Part], None], max_tokens: int | None) -> None:
        if not isinstance(agent.sampler, StreamingSampler):
            raise ConfigError(f"{type(agent.sampler).__name__} cannot be followed: it has no method stream")
        self._agent, self._sampler, self._tell, self._max_tokens = agent, agent.sampler, tell, max_tokens
        environment = agent.environment
        self._format = environment.format if isinstance(environment, ChatEnvironment) else None
        self._turn: _TaggedTurn | _ChatTurn | None = None  # the latest, until all of it is told
        self._event: Mapping[str, Any] = {}  # of the latest turn
        self._reply: Part | None = None
        self._waiting: Part | None = None  # a reply that is held back for a summary
        self._searches: list[Search] = []
        self._calls: list[Mapping[str, Any]] = []
        self._num_turns = self._sampled_length = self._observed_length = 0
        self._context: list[int] = []  # what the policy has seen and written so far in its sequence
        # The loop of the episode reads these from its environment, which is now this object.
        self.stop_strings, self.tags = environment.stop_strings, environment.tags
        self.stop_token_ids = environment.stop_token_ids
        self.summary_stop_strings, self.summary_request = environment.summary_stop_strings, environment.summary_request

    async def play(self, prompt: Prompt, seed: int | None) -> Finished:
        answer, failure, status = None, None, Status.LENGTH_LIMIT
        # Play it as in training, with this object in place of sampler and environment. A spent budget ends it early.
        self._context = list(prompt.ids)
        with contextlib.suppress(_BudgetSpent):
            trajectory = await replace(self._agent, sampler=self, environment=self).play(prompt, seed)
            assert trajectory.status is not None
            status, failure = trajectory.status, trajectory.failure
            grammar = self._agent.template.grammar
            answer = final_answer(read_turns(trajectory, self._agent.tokenizer, grammar), grammar)
        # What is not told yet of the last turn, then the outcome.
        self._end_turn()
        return Finished(
            status=status,
            answer=answer,
            failure=failure,
            searches=tuple(self._searches),
            num_turns=self._num_turns,
            prompt_length=len(prompt.ids),
            sampled_length=self._sampled_length,
            observed_length=self._observed_length,
            calls=None if self._format is None else tuple(self._calls),
        )

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """One turn of the policy, as the agent's sampler gives it."""
        left = sampling.max_tokens if self._max_tokens is None else self._max_tokens - self._sampled_length
        if left <= 0:
            raise _BudgetSpent
        # Report the last reply only now: an observation that leaves no room for a turn is never read by the policy.
        if self._reply is not None:
            self._tell_all([self._reply])
            self._reply = None
        # Count what came since the last turn. A context that does not continue it is a further sequence's, most of it
        # no new observation.
        if list(ids[: len(self._context)]) == self._context:
            self._observed_length += len(ids) - len(self._context)
        generation = await self._sample(ids, replace(sampling, max_tokens=min(left, sampling.max_tokens)))
        self._num_turns += 1
        self._sampled_length += len(generation.ids)
        self._context = [*ids, *generation.ids]
        if generation.finish_reason == "length" and left < sampling.max_tokens:
            raise _BudgetSpent
        return generation

    async def _sample(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        tokenizer, grammar = self._agent.tokenizer, self._agent.template.grammar
        turn = _TaggedTurn(grammar, tokenizer) if self._format is None else _ChatTurn(self._format, tokenizer)
        self._turn, self._event = turn, {}
        pieces = []
        async with contextlib.aclosing(self._sampler.stream(ids, sampling)) as stream:
            async for piece in stream:
                pieces.append(piece)
                self._tell_all(turn.feed(piece.ids))
        return join_pieces(pieces)

    async def open(self, prompt: Prompt) -> Episode:
        """The episode of the agent's environment."""
        opened = await self._agent.environment.open(prompt)
        if not isinstance(opened, Episode):  # `run_episode` sees only the object around it
            raise ConfigError(f"open of {dotted_name(self._agent.environment)} gave {opened!r}, which is no Episode")
        return _FollowedEpisode(opened, self.answered, self._asked_for_summary, self._summed_up)

    def answered(self, given: Outcome) -> Outcome:
        """Report what the agent's environment has answered."""
        outcome = checked_outcome(given, self._agent.environment)
        self._event = event = {**outcome.event, "action": outcome.action}
        if outcome.action != "answer":
            self._end_turn()
        calls = event.get("calls") or () if self._format is not None else ()
        self._calls += calls
        for search in searches_of(event):
            documents, milliseconds = search.get("document_ids", ()), search.get("milliseconds", 0.0)
            self._searches.append(Search(str(search.get("query", "")), tuple(documents), milliseconds))
        if self._format is not None:
            told = whole_characters(chat_reply(event))
            self._reply = Part("result" if calls else "feedback", f"\n\n{told}\n\n" if told else "")
            return outcome
        # The policy reads a new context instead of all before it, so that all of it is told.
        text = "\n".join(message["content"] for message in outcome.context or ()) or outcome.reply
        self._reply = Part("information" if was_search(event) else "feedback", whole_characters(text))
        return outcome

    def _asked_for_summary(self, asked: Outcome | None, request: str) -> Outcome | None:
        """The latest reply waits; the policy reads the request instead."""
        if asked is not None:
            self._waiting, self._reply = self._reply, Part("feedback", whole_characters(f"\n\n{request}\n\n"))
        return asked

    def _summed_up(self, outcome: Outcome) -> Outcome:
        """The turn was a summary; the reply that waited follows it."""
        self._event = {**outcome.event, "action": outcome.action}
        self._end_turn()
        self._reply, self._waiting = self._waiting, None
        return outcome

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        return self._agent.environment.prompt_ids(messages)

    async def check(self) -> None:
        await self._agent.environment.check()

    async def close(self) -> None:
        """The environment is the agent's, and stays open."""

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._tell_all(turn.end(self._event))

    def _tell_all(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.text:
                self._tell(part)
