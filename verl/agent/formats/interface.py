"""What a format of tool calls is: from messages to token ids, and from the ids of a turn to its calls.

A chat model writes tool calls in the form that its chat template taught it. A `Format` knows one such form. Ids go in
and come out: what the policy sampled is neither decoded and encoded again nor changed afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = Mapping[str, Any]
"""A message as chat templates take it: `role` (system, user, assistant or tool) and `content`, a text. An assistant
message may have `reasoning_content`, a text, and `tool_calls`, a list of `{"type": "function", "function": {"name":
..., "arguments": {...}}}`. A tool message, the result of a call, may have `name` and `tool_call_id`."""

Tool = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": ..., "description": ..., "parameters":
a JSON schema}}`."""


class CallStatus(StrEnum):
    """Whether a tool call can be executed, and if not, the first thing that is wrong with it."""

    OK = "ok"
    """The call names a tool, and its arguments fit the tool's schema."""
    INVALID_JSON = "invalid_json"
    """The text of the call is not in the format's syntax: JSON, or the XML of formats that write calls so."""
    UNCLOSED = "unclosed"
    """The turn ended, or another call began, before the end of the call."""
    MISSING_NAME = "missing_name"
    """The call has no name, or one that is not a text."""
    UNKNOWN_TOOL = "unknown_tool"
    """None of the tools has the name."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not fit the tool's JSON schema."""


@dataclass(frozen=True)
class Call:
    """One tool call of a turn.

    `name` is "" and `arguments` are empty where the call has none that could be read. `span` is the place of the call
    in the turn, from its first token to the one after its last, with its tags; where tags are not tokens of their own,
    two calls may have one token in common. `detail` says what is wrong, in words that can be shown to the policy; it is
    "" for a call that is OK.
    """

    name: str
    arguments: dict[str, Any]
    status: CallStatus
    span: tuple[int, int]
    detail: str


def call_message(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call as an entry of `tool_calls` of a `Message`."""
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read: its thinking, what it says, and its calls in their order.

    `content` is the text outside of thinking and calls. White space at both ends of `reasoning` and `content` is left
    out.
    """

    reasoning: str
    content: str
    calls: tuple[Call, ...]

    def message(self) -> dict[str, Any]:
        """The assistant message that says the turn: `role`, `content`, and where there are any, `reasoning_content` and
        `tool_calls`. A call that could not be read has in it only what could."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call_message(call.name, call.arguments) for call in self.calls]
        return message


@dataclass(frozen=True)
class Rendered:
    """Messages as token ids, with the generation prompt, and the text that these ids stand for."""

    ids: tuple[int, ...]
    text: str


class Format(ABC):
    """How a model writes tool calls, and how messages become its context.

    `stop_token_ids` are the tokens that end a turn of the policy. `think_ids`: the tokens that open and close thinking;
    None: the format has no thinking. `prompt_thinks`: the generation prompt has opened it already.
    """

    stop_token_ids: tuple[int, ...]
    think_ids: tuple[int, int] | None = None
    prompt_thinks: bool = False

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """The context for a conversation, which ends with the prompt for the assistant's next turn.

        All texts of the messages, and those of the tools, are text from outside: no added token of the tokenizer comes
        out of them. Raises `DataError` for messages that the chat template cannot write, and for a conversation that
        ends with the assistant; `ConfigError` for tools that are not in the form of `Tool`.
        """

    @abstractmethod
    def bridge(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...] | None:
        """The ids that follow a context for new messages, so that the context stays as it was sampled.

        `ids` are the whole context, which ends with a turn of the policy, complete or cut off. `messages` are tool
        results or user messages, as text from outside. The ids end with the prompt for the next turn. None if the
        context may not be kept, because thinking has to leave it: then render the conversation anew. Raises
        `DataError` for other messages, and for those that the chat template cannot write.
        """

    @abstractmethod
    def turn(self, message: Message) -> tuple[int, ...]:
        """An assistant message as a turn after the generation prompt, with the token that ends it.

        Its texts are text from outside. Raises `DataError` if the chat template cannot write it so, for instance
        because it has no place for thinking, or takes one call only.
        """

    @abstractmethod
    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads the turn that the policy sampled; what follows the first stop token is not read.

        Any ids can be read: what is wrong with a call is its status. Raises `ConfigError` for tools that are not in the
        form of `Tool`, or whose schema is no JSON schema.
        """
