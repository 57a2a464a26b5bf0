"""Answers a chat request with an episode: as one reply, or as a stream of server-sent events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from search_r1.http.gate import Metrics, Receive, Scope, Send
from search_r1.http.routes import DeadlineExpired
from search_r1.llm_agent.agent import SearchAgent
from search_r1.serve.access_log import Notes
from search_r1.serve.parts import Part
from search_r1.serve.streaming import Finished, stream_episode
from search_r1.serve.wire import (
    INTERNAL_ERROR,
    ApiError,
    ChatRequest,
    answer_chunk,
    completion,
    error_body,
    first_chunk,
    last_chunk,
    part_chunk,
    usage_chunk,
)
from verl.errors import DataError, VerlError
from verl.protocol import Prompt, Status

_LOG = logging.getLogger(__name__)
History = Literal["use", "ignore", "refuse"]
IGNORED_HEADER = "X-Search-R1-Ignored"
# In JSON these may stand as they are, but a client that reads events by lines takes each for the end of one.
_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}


@dataclass(frozen=True)
class ServeOptions:
    """`max_concurrent`: most requests in progress; more get HTTP 503. `seed`: for requests without one.

    `history`: whether messages before the question are part of the prompt (of a chat model only), ignored, or an error.
    """

    model: str
    timeout_s: float = 120.0
    max_concurrent: int = 64
    seed: int | None = None
    auth_token: str | None = None
    history: History = "ignore"
    access_log: bool = True


class Chat:
    """Answers chat requests with episodes."""

    def __init__(self, agent: SearchAgent, options: ServeOptions, metrics: Metrics) -> None:
        self.agent, self.options, self.metrics = agent, options, metrics

    def check_model(self, name: str) -> None:
        """Raises `ApiError` 404 unless `name` is the served model."""
        if name != self.options.model:
            message = f"the model {name!r} does not exist; this server has {self.options.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def respond(self, request: ChatRequest, notes: Notes) -> Response:
        """The whole reply, or a stream. Raises `ApiError`, or an error of the sampler."""
        self.check_model(request.model)
        prompt = self._prompt(request)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.options.model}
        # The policy answers without the messages that it does not read: the client and the log are told of them.
        unread = "" if self.options.history == "use" else request.before
        headers = {IGNORED_HEADER: unread} if unread else {}
        if unread:
            notes.append(f"ignored {unread}")
        if request.stream:
            return EventStream(self._events(head, request, prompt, notes), headers)
        # Without a stream the parts are collected; the last item of the episode says how it ended.
        parts: list[Part] = []
        async with aclosing(self._episode(request, prompt, notes)) as episode:
            async for part in episode:
                if isinstance(part, Part):
                    parts.append(part)
                else:
                    return JSONResponse(completion(head, parts, part), headers=headers)
        raise AssertionError("unreachable: an episode ends with how it finished")

    def _prompt(self, request: ChatRequest) -> Prompt:
        if request.before and self.options.history == "refuse":
            raise ApiError(
                400,
                "send the question alone: the policy was trained on its own prompt with one question in it, and this "
                f"server (--history refuse) drops nothing in silence; before the question came {request.before}",
                "messages",
            )
        before = request.conversation if self.options.history == "use" else ()
        try:
            prompt = self.agent.prompt(request.question, before=before)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        # A longer prompt leaves no room for a turn: the episode would end before the policy has said anything.
        limits = self.agent.limits
        longest = min(limits.max_context_length, limits.window - 1)
        if len(prompt.ids) > longest:
            what = "the conversation" if before else "the question"
            message = f"the prompt has {len(prompt.ids)} tokens, this server takes {longest}; shorten {what}"
            raise ApiError(400, message, "messages", "context_length_exceeded")
        return prompt

    async def _episode(
        self, request: ChatRequest, prompt: Prompt, notes: Notes
    ) -> AsyncGenerator[Part | Finished, None]:
        """Play the episode and note its outcome.

        Raises `ApiError` if the retriever failed in it, since no answer is made up, and `DeadlineExpired`.
        """
        options, outcome = self.options, "unfinished"
        seed = options.seed if request.seed is None else request.seed
        agent = _with_sampling(self.agent, request)
        try:
            async with aclosing(stream_episode(agent, prompt, seed, options.timeout_s, request.budget)) as episode:
                async for part in episode:
                    if isinstance(part, Finished) and part.status is Status.FAILED:
                        self.metrics.errors.inc()
                        raise ApiError(503, f"the retriever failed: {part.failure}", code="retriever_unavailable")
                    if isinstance(part, Finished):
                        outcome = _outcome(part)
                    yield part
        except TimeoutError as error:
            raise DeadlineExpired(f"not answered within the deadline of {options.timeout_s:g} s") from error
        finally:
            # However it ends: the log line says "unfinished" if no outcome was reached, as when the client goes away.
            notes.append(outcome)

    async def _events(
        self, head: dict[str, Any], request: ChatRequest, prompt: Prompt, notes: Notes
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: chunks, or an error at their end."""
        try:
            # Both generators are closed with this one, so that the end of the connection ends the episode.
            async with (
                aclosing(self._episode(request, prompt, notes)) as episode,
                aclosing(_chunks(head, episode, request.includes_usage)) as chunks,
            ):
                async for chunk in chunks:
                    yield event(chunk)
        except ApiError as error:
            # The reply has begun with status 200, so that an error can only be told as an event.
            yield event(error.body)
        except DeadlineExpired as error:
            self.metrics.expired.inc()
            yield event(error_body(504, str(error)))
        except VerlError as error:
            self.metrics.errors.inc()
            yield event(error_body(500, str(error)))
        except Exception:  # of an environment or a tool, whose code may be anybody's
            _LOG.exception("an episode broke")
            self.metrics.errors.inc()
            yield event(error_body(500, INTERNAL_ERROR))
        yield b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream of events that is closed when either side ends the connection."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers | {"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _chunks(
    head: dict[str, Any], episode: AsyncIterator[Part | Finished], includes_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    yield first_chunk(head)
    # The answer's part is held back: what clients show as content is the answer itself, which only the end tells.
    answer = Part("answer", "")
    async for part in episode:
        if isinstance(part, Finished):
            if part.answer is not None or answer.text:
                yield answer_chunk(head, answer, part.answer)
            yield last_chunk(head, part)
            if includes_usage:
                yield usage_chunk(head, part)
        elif part.kind == "answer":
            answer = part
        else:
            yield part_chunk(head, part)


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False).translate(_LINE_ENDS)}\n\n".encode()


def _outcome(finished: Finished) -> str:
    searches = f"{len(finished.searches)} search{'' if len(finished.searches) == 1 else 'es'}"
    return f"{finished.prompt_length}+{finished.sampled_length} tokens, {searches}, {finished.status}"


def _with_sampling(agent: SearchAgent, request: ChatRequest) -> SearchAgent:
    fields = {"temperature": request.temperature, "top_p": request.top_p}
    chosen: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return replace(agent, sampling=replace(agent.sampling, **chosen))
