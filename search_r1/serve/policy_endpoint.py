"""The endpoint at which the program of an episode asks the policy: OpenAI's interface, in the process that samples.

    POST /sessions/{session}/v1/chat/completions    messages and tools; whole, or as a stream of one piece
    POST /sessions/{session}/v1/completions         token ids
    GET  /sessions/{session}/v1/models

Each session has an address and a key of its own. A turn is sampled as the run samples it: temperature and the like are
the run's, whatever a program asks for (a header of the reply names what was ignored). With `return_token_ids`, the
reply has the ids of the prompt and of the turn. A refused call gets an error in OpenAI's shape, with `code` as in
`verl.agent.session`; clients do not repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from search_r1.errors import ServerError
from search_r1.http.client import host_and_port
from search_r1.http.gate import Metrics
from search_r1.http.process import bind
from search_r1.http.routes import RawRoute, answer_in_time, schema_of
from search_r1.serve.chat import IGNORED_HEADER, event
from search_r1.serve.error_replies import NO_RETRY, add_openai_error_handlers
from search_r1.serve.wire import (
    SYSTEM_ROLES,
    ApiError,
    StreamOptions,
    TextMessage,
    TextPart,
    check_extra,
    error_body,
    first_problem,
    text_of,
)
from verl.agent.program import Endpoint
from verl.agent.program_kinds import MODEL
from verl.agent.session import (
    FAILED,
    INVALID,
    IS_OVER,
    TOO_LONG,
    TURN_LIMIT,
    UNKNOWN_KEY,
    CallRefused,
    Completion,
    PolicyCall,
    Session,
    Sessions,
)
from verl.agent.text import decode_ids
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATUS = {INVALID: 400, TOO_LONG: 400, TURN_LIMIT: 400, UNKNOWN_KEY: 401, IS_OVER: 410, FAILED: 500}
_LONGEST_S = 86_400.0  # a call waits as long as the run is interrupted; its client has a limit of its own
_OF_THE_RUN = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "logit_bias"),
    }
)
"""What a program may ask for, but the run decides."""


class PolicyEndpoint(Endpoint):
    """See `verl.agent.program.Endpoint`."""

    async def start(self, sessions: Sessions, tokenizer: PreTrainedTokenizerBase, host: str) -> None:
        try:
            listener = bind(host, 0)
        except ServerError as error:
            raise ConfigError(f"agent.program_host={host}: {error}") from error
        host, port = listener.getsockname()[:2]
        self._address = host_and_port(_reachable(host), port)
        app = create_app(sessions, tokenizer)
        config = uvicorn.Config(app, log_level="warning", access_log=False, proxy_headers=False, lifespan="off")
        config.timeout_keep_alive = 75  # longer than clients keep an idle connection
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        # The server accepts connections once it has `started`; if that fails, its task ends instead.
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)

    def base_url(self, session: str) -> str:
        return f"http://{self._address}/sessions/{session}/v1"

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving


class _Server(uvicorn.Server):
    """A server that leaves the signals to the process it is in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _reachable(host: str) -> str:
    """The address of this machine for others, where the server listens at all of its addresses."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of no machine; nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def create_app(sessions: Sessions, tokenizer: PreTrainedTokenizerBase) -> FastAPI:
    """The app that serves `sessions`."""
    app = FastAPI(title="policy")

    async def answered(http: Request, read: Any, write: Any) -> Response:
        session = session_of(sessions, http)

        async def answer(body: bytes) -> Response:
            request = read(body)
            reply = write(request, await session.complete(request.call()), tokenizer)
            headers = {IGNORED_HEADER: ", ".join(request.ignored)} if request.ignored else None
            if request.stream:
                return Response(b"".join(stream_of(reply, request)), 200, headers, "text/event-stream")
            return JSONResponse(reply, 200, headers)

        return await answer_in_time(http, _LONGEST_S, answer)

    async def chat_completions(http: Request) -> Response:
        """The policy's turn after a conversation."""
        return await answered(http, ChatRequest.read, chat_reply)

    async def completions(http: Request) -> Response:
        """The policy's turn after token ids."""
        return await answered(http, TokenRequest.read, token_reply)

    # The route reads the body itself: the OpenAPI schema only describes it.
    routes = (("chat/completions", chat_completions, ChatRequest), ("completions", completions, TokenRequest))
    for path, route, model in routes:
        app.router.add_api_route(
            f"/sessions/{{session}}/v1/{path}",
            route,
            methods=["POST"],
            route_class_override=RawRoute,
            openapi_extra=schema_of(model),
        )

    @app.get("/sessions/{session}/v1/models")
    async def models(http: Request) -> dict[str, Any]:
        """The one model, which has any other name too."""
        session_of(sessions, http)
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "search_r1"}]}

    @app.exception_handler(CallRefused)
    async def refused(_: Request, error: CallRefused) -> JSONResponse:
        status = _STATUS[error.code]
        return JSONResponse(error_body(status, str(error), error.field, error.code), status, NO_RETRY)

    add_openai_error_handlers(app, Metrics("policy"))  # which nobody reads
    return app


def session_of(sessions: Sessions, http: Request) -> Session:
    """The session that a request may use, by its address and its key. Raises `CallRefused`."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return sessions.find(http.path_params["session"], key.strip() if scheme.lower() == "bearer" else "")


# Requests.


class _Request(BaseModel):
    """What both kinds of calls have in common. A field that would change the reply but is not supported is refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @classmethod
    def read(cls, body: bytes) -> Any:
        """The request in `body`. Raises `ApiError` 400 that names the field."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise first_problem(error) from error
        check_extra({name: value for name, value in request.extra.items() if name not in _OF_THE_RUN})
        return request

    @property
    def extra(self) -> Mapping[str, Any]:
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """What was asked for and is the run's to decide."""
        names = [name for name, value in self.extra.items() if name in _OF_THE_RUN and value is not None]
        return sorted(names + ["parallel_tool_calls"] * (self.extra.get("parallel_tool_calls") is False))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(TextMessage):
    """`content` is a text, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(_Request):
    """A body of `chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None

    def call(self) -> PolicyCall:
        """Raises `ApiError` for calls in the messages whose arguments are no JSON object."""
        names: dict[str | None, str] = {}  # of the called tools
        messages = [_message(number, message, names) for number, message in enumerate(self.messages)]
        tools = [] if self.tool_choice == "none" else [_known_fields(tool) for tool in self.tools or ()]
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return PolicyCall(messages, tools, max_tokens=limit, stop=self.stops, answered=_answered(self.messages))


def _known_fields(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without `strict` and its like, which say nothing to the policy."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    known = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": tool.get("type"), "function": known}


def _answered(messages: Sequence[Message]) -> dict[int, int]:
    """`PolicyCall.answered` by the ids of the calls: of the latest message that has a call with that id."""
    places: dict[str | None, int] = {}
    answered = {}
    for number, message in enumerate(messages):
        places |= {call.id: place for place, call in enumerate(message.tool_calls or ()) if call.id is not None}
        if message.role == "tool" and message.tool_call_id in places:
            answered[number] = places[message.tool_call_id]
    return answered


def _message(number: int, message: Message, names: dict[str | None, str]) -> dict[str, Any]:
    """The message as chat templates take it."""
    role = "system" if message.role in SYSTEM_ROLES else message.role
    told: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.reasoning_content:
        told["reasoning_content"] = message.reasoning_content
    # A result comes with the id of its call, which has the name of the tool.
    if role == "tool":
        told["name"] = message.name or names.get(message.tool_call_id, "")
    # Arguments come as JSON in a text; templates take the object.
    if message.tool_calls:
        told["tool_calls"] = []
        for place, call in enumerate(message.tool_calls):
            names[call.id] = call.function.name
            arguments = _arguments(call.function.arguments, f"messages.{number}.tool_calls.{place}.function.arguments")
            told["tool_calls"].append(
                {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            )
    return told


def _arguments(text: str, field: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{field}: it must be a JSON object, written as a text", field, INVALID)
    return arguments


class TokenRequest(_Request):
    """A body of `completions`."""

    prompt: list[int] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @field_validator("prompt", mode="before")
    @classmethod
    def _no_text(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            raise ValueError("send token ids: a text would be read into other ids than those that were sampled")
        return prompt

    def call(self) -> PolicyCall:
        return PolicyCall(ids=tuple(self.prompt), max_tokens=self.max_tokens, stop=self.stops)


# Replies.


def _head(request: _Request, kind: str) -> dict[str, Any]:
    name = f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model or MODEL}


def _usage(turn: Completion) -> dict[str, int]:
    prompt, sampled = len(turn.context), len(turn.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def chat_reply(request: ChatRequest, turn: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The reply to a `ChatRequest`."""
    message = dict(turn.message)
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_written_call(call["function"]) for call in calls]
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish_reason}
    if request.logprobs:
        sampled = zip(turn.ids, turn.log_probs, strict=True)
        choice["logprobs"] = {"content": [_log_prob(decode_ids(tokenizer, [one]), value) for one, value in sampled]}
    reply = {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(turn)}
    if request.return_token_ids:
        choice["token_ids"], reply["prompt_token_ids"] = list(turn.ids), list(turn.context)
    return reply


def _written_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    written = {"name": function["name"], "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": written}


def _log_prob(token: str, value: float) -> dict[str, Any]:
    # The bytes of a token that is a part of a character are not those of its text.
    known = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": value, "bytes": known, "top_logprobs": []}


def token_reply(request: TokenRequest, turn: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The reply to a `TokenRequest`."""
    choice: dict[str, Any] = {"index": 0, "text": turn.message["content"], "logprobs": None}
    choice["finish_reason"] = turn.finish_reason
    if request.logprobs is not None:
        tokens = [decode_ids(tokenizer, [one]) for one in turn.ids]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": list(turn.log_probs), "top_logprobs": None}
    if request.return_token_ids:
        choice["token_ids"], choice["prompt_token_ids"] = list(turn.ids), list(turn.context)
    return {**_head(request, "text_completion"), "choices": [choice], "usage": _usage(turn)}


def stream_of(reply: dict[str, Any], request: _Request) -> Iterator[bytes]:
    """The reply as server-sent events: the whole turn in one piece, for clients that only take streams."""
    head = {name: reply[name] for name in ("id", "created", "model")}
    [choice] = reply["choices"]
    # A chunk of a chat has a `delta` in place of the message, and numbers its calls.
    if "message" in choice:
        head["object"] = "chat.completion.chunk"
        message = choice.pop("message")
        calls = [{"index": place} | call for place, call in enumerate(message.pop("tool_calls", ()))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
    else:
        head["object"] = reply["object"]
    others = {name: reply[name] for name in ("prompt_token_ids",) if name in reply}
    yield event({**head, **others, "choices": [choice]})
    # The usage comes in an event of its own, which has no choices.
    if request.stream_options is not None and request.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": reply["usage"]})
    yield b"data: [DONE]\n\n"
