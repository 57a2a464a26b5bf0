"""The chat requests that are accepted, and the errors for those that are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from search_r1.serve.parts import Part, merged
from search_r1.serve.streaming import Finished
from verl.protocol import Status, call_status

# What says nothing about the reply, and what asks for no more than is given anyway.
_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "service_tier", "parallel_tool_calls", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "cache_salt"),
        *("priority", "request_id", "session_id", "keep_alive", "mm_payload"),
        *("reasoning_effort", "verbosity"),  # a policy thinks and answers at the length that it was trained to
    }
)
# The values that leave a reply as it is, of parameters of OpenAI and of the engines that speak its protocol; clients
# that fill in every field send them. Of a parameter that is not listed, those are empty lists and objects.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # sampling
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "top_a", "min_tokens", "mirostat"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p", "best_of"), (1,)),
    "top_k": (-1, 0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "watermarking": (False,),
    # where the text ends, and what is left out of it
    "stop": ([], ""),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "no_stop_trim"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    # the prompt, which is the template's
    **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens"), (False,)),
    "add_generation_prompt": (True,),
    # what a reply consists of
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), (False,)),
    **dict.fromkeys(("return_prompt_text", "return_mm_kwargs"), (False,)),
    "routed_experts_prompt_start": (0,),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
    # tools
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "web_search_options": (),  # an empty object asks for a search of the web
}
_EMPTY: tuple[Any, ...] = ([], {})
SYSTEM_ROLES = ("system", "developer")
INTERNAL_ERROR = "internal error: the log of the server has it"


class ApiError(Exception):
    """An error reply in OpenAI's shape, with the HTTP `status`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 503: "service_unavailable", 504: "timeout"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class TextMessage(BaseModel):
    """A message without the fields in which OpenAI's models say something that no chat template writes."""

    model_config = ConfigDict(strict=True)

    function_call: Any = None
    refusal: Any = None

    @field_validator("function_call", "refusal")
    @classmethod
    def _says_nothing(cls, value: Any) -> None:
        if value:
            raise ValueError("it would not be read; say it in content, or leave it out")


class Message(TextMessage):
    """`content` is a text, or a list of text parts. Of messages before the question only the role is read, but with
    `--history use`, which takes them all without the `tool_calls` of others."""

    role: str
    content: str | list[TextPart] | None
    tool_calls: Any = None

    @property
    def text(self) -> str:
        return text_of(self.content)


def text_of(content: str | list[TextPart] | None) -> str:
    """The text of a message's `content`."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ChatRequest(BaseModel):
    """A body of `POST /v1/chat/completions`. A field that would change the reply but is not supported is refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="maximum number of sampled tokens, over all turns")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    n: Literal[1] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _only_the_question_is_read(cls, messages: Any, info: ValidationInfo) -> Any:
        if not isinstance(messages, list):
            return messages
        if info.context and info.context["reads_history"]:
            # With tool calls, for which it is refused, a reply needs no content.
            earlier = [
                {"content": None, **one} if isinstance(one, dict) and one.get("role") == "assistant" else one
                for one in messages[:-1]
            ]
            return earlier + messages[-1:]
        unread = dict.fromkeys(("content", "tool_calls", "function_call", "refusal"))
        earlier = [{**one, **unread} if isinstance(one, dict) else one for one in messages[:-1]]
        return earlier + messages[-1:]

    @field_validator("max_tokens", "max_completion_tokens", mode="before")
    @classmethod
    def _minus_one_is_no_limit(cls, limit: Any) -> Any:
        return None if limit == -1 else limit

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def question(self) -> str:
        """The text of the last message. Raises `ApiError` if that is not a user message, or empty."""
        last = self.messages[-1]
        if last.role != "user":
            raise ApiError(400, f"the last message is the question: its role is {last.role!r}, not 'user'", "messages")
        if not last.text.strip():
            raise ApiError(400, "the question is empty", "messages")
        return last.text

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages before the question, with their texts. Raises `ApiError` for those that a conversation with
        this server does not have: tool calls of the client's own, and their results."""
        for number, message in enumerate(self.messages[:-1]):
            if message.role not in (*SYSTEM_ROLES, "user", "assistant") or message.tool_calls:
                what = "tool calls" if message.tool_calls else f"role {message.role!r}"
                allowed = "this server runs its own tools: send messages of system, user and assistant with text"
                raise ApiError(400, f"messages.{number} has {what}; {allowed}", "messages")
        return [
            {"role": "system" if message.role in SYSTEM_ROLES else message.role, "content": message.text}
            for message in self.messages[:-1]
            if message.text
        ]

    @property
    def before(self) -> str:
        """A description of the messages before the question; "" if there are none."""
        roles = [message.role for message in self.messages[:-1]]
        num_system = sum(role in SYSTEM_ROLES for role in roles)
        counts = {"system message": num_system, "earlier message": len(roles) - num_system}
        return ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)


def parse_chat(body: bytes, reads_history: bool = False) -> ChatRequest:
    """The request in `body`, with the texts before the question if the server `reads_history`. Raises `ApiError` 400
    that names the field."""
    try:
        request = ChatRequest.model_validate_json(body, context={"reads_history": reads_history})
    except ValidationError as error:
        raise first_problem(error) from error
    check_extra(request.model_extra or {})
    return request


def first_problem(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = error.errors()[0]
    where, message = first["loc"], first["msg"]
    if "content" in where:  # as a text it would be wrong in one way, as a list of parts in another
        where, message = where[:3], "it must be a text or a list of text parts"
    param = ".".join(map(str, where)) or None
    return ApiError(400, f"{param}: {message}" if param else message, param)


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise `ApiError` 400 for a further parameter whose value would change the reply."""
    for name, value in extra.items():
        if name not in _IGNORED and value is not None and value not in _NEUTRAL.get(name, _EMPTY):
            neutral = " or ".join(map(json.dumps, _NEUTRAL.get(name, ()))) or "null"
            message = f"{name} is not supported by this endpoint; leave it out, or send {neutral}"
            raise ApiError(400, message, name, "unsupported_parameter")


# Replies in OpenAI's format, with a report on the episode under `search_r1`.


def completion(head: dict[str, Any], parts: Sequence[Part], finished: Finished) -> dict[str, Any]:
    """The whole reply. `head` has `id`, `created` and `model`."""
    parts = merged(parts)
    message = {
        "role": "assistant",
        "content": finished.answer or "",
        "reasoning_content": "".join(part.text for part in parts if part.kind != "answer"),
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(finished)}
    extension = {**_report(finished), "parts": [asdict(part) for part in parts]}
    return {
        **head, "object": "chat.completion", "choices": [choice], "usage": _usage(finished), "search_r1": extension,
    }  # fmt: skip


def first_chunk(head: dict[str, Any]) -> dict[str, Any]:
    return _chunk(head, {"role": "assistant", "content": ""})


def part_chunk(head: dict[str, Any], part: Part) -> dict[str, Any]:
    """A chunk with a part that is not the answer."""
    return _chunk(head, {"reasoning_content": part.text}) | {"search_r1": asdict(part)}


def answer_chunk(head: dict[str, Any], part: Part, answer: str | None) -> dict[str, Any]:
    """A chunk with the answer, and the part of the transcript that contains it."""
    return _chunk(head, {"content": answer or ""}) | {"search_r1": asdict(part)}


def last_chunk(head: dict[str, Any], finished: Finished) -> dict[str, Any]:
    return _chunk(head, {}, _finish_reason(finished)) | {"search_r1": _report(finished)}


def usage_chunk(head: dict[str, Any], finished: Finished) -> dict[str, Any]:
    return {**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(finished)}


def _chunk(head: dict[str, Any], delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def _finish_reason(finished: Finished) -> str:
    """ "length" when the policy ran out of turns or tokens before it answered."""
    return "stop" if finished.status is Status.ANSWERED else "length"


def _usage(finished: Finished) -> dict[str, int]:
    prompt, sampled = finished.prompt_length, finished.sampled_length
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _report(finished: Finished) -> dict[str, Any]:
    searches = [
        {"query": search.query, "document_ids": list(search.document_ids), "ms": round(search.milliseconds, 3)}
        for search in finished.searches
    ]
    calls = [
        {
            "name": call["name"],
            "arguments": call["arguments"],
            "status": call_status(call),
            "ms": round(call.get("milliseconds", 0.0), 3),
        }
        for call in finished.calls or ()
    ]
    return {
        "answer": finished.answer,
        "status": finished.status.value,
        "turns": finished.num_turns,
        "searches": searches,
        **({} if finished.calls is None else {"calls": calls}),
        "information_tokens": finished.observed_length,
    }
