"""Conversations in the OpenAI chat schema, as rows of the supervised warm start: reading and checking them.

A row has `messages` (roles system, user, assistant and tool), and optionally `tools` and `phase`. A checked
conversation has no null fields, arguments of calls are objects, and the results of a turn stand in the order of its
calls, as those of an episode do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from verl.agent.formats.calls import Malformed, read_json, tool_schemas
from verl.agent.formats.conversation import call_arguments
from verl.agent.formats.interface import Message, Tool
from verl.agent.messages import ROLES
from verl.agent.tools.definition import ArgumentChecker
from verl.errors import ConfigError, DataError, translated

_FIELDS = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls", "train"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'


@dataclass(frozen=True)
class ConversationRow:
    """One conversation as it is trained; `where` names file and row number for error messages.

    `trained` are the places of the assistant messages that are trained, from 0.
    """

    messages: tuple[Message, ...]
    trained: frozenset[int]
    tools: tuple[Tool, ...]
    phase: str | None
    where: str

    @property
    def needs_tools(self) -> str:
        """Which part of the row needs a chat template that can write tools; "" if there is none."""
        if self.tools:
            return "tools"
        calls = (place for place, message in enumerate(self.messages) if message.get("tool_calls"))
        return next((f"messages[{place}]" for place in calls), "")


def conversation_row(messages: Any, tools: Any, phase: str | None, where: str) -> ConversationRow:
    """A row from its fields, as JSON or Parquet gives them. Raises DataError naming the row and the message, from 0."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages is {messages!r:.100}; it has to be a list of messages")
    checked: list[dict[str, Any]] = []
    open_calls: dict[int, dict[str, Any]] = {}  # of the last assistant message, by their order
    results: dict[int, dict[str, Any]] = {}
    for place, given in enumerate(messages):
        here = f"{where}, messages[{place}]"
        message = _known_fields(given, here)
        _check_content(message, here)
        role = message["role"]
        # A turn's results come before anything else, in any order; they are kept in the order of the calls.
        if role == "tool":
            number = _answered(message, open_calls, results, here)
            results[number] = message
            del open_calls[number]
            if not open_calls:
                checked += [results[number] for number in sorted(results)]
            continue
        if open_calls:
            raise DataError(
                f"{here}: a message of {role} follows, but {_named(next(iter(open_calls.values())))} has no result; "
                "put its result (role tool) in between, or take the call out"
            )
        _check_order(role, checked, here)
        if role == "assistant":
            message["tool_calls"] = _calls(message.pop("tool_calls", None), here)
            open_calls, results = dict(enumerate(message["tool_calls"])), {}
        checked.append(message)
    # Results of a last turn of which some are missing follow no turn that could need them: they are not written.
    trained = _trained(checked, where)
    return ConversationRow(tuple(checked), trained, _tools(tools, where), phase, where)


def _known_fields(given: Any, here: str) -> dict[str, Any]:
    """The fields of a message that say something. Null, as Parquet and OpenAI's answers have it, is no field."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{here}: its role is {role!r:.100}; a message has a role, one of {', '.join(ROLES)}")
    message = {name: value for name, value in given.items() if value is not None}
    if "train" in message and not isinstance(message["train"], bool):
        raise DataError(f"{here}: train is {message['train']!r:.100}; write true or false")
    # Only the assistant's turns are trained, so `train: false` says nothing new of the others.
    if role != "assistant" and message.get("train") is False:
        del message["train"]
    # Tables give all messages the same fields: an empty one that does not belong to the role is dropped.
    for name in [name for name in message if name not in _FIELDS[role]]:
        if message[name] not in ("", [], {}):
            known = ", ".join(_FIELDS[role])
            raise DataError(f"{here}: messages of {role} have no field {name!r}; take it out, or use one of {known}")
        del message[name]
    return message


def _check_content(message: dict[str, Any], here: str) -> None:
    role = message["role"]
    for name in ("content", "reasoning_content", "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise DataError(f"{here}: {name} is {message[name]!r:.100}; it has to be one text")
    if role == "assistant":
        message.setdefault("content", "")
        if not message["content"].strip() and not message.get("tool_calls"):
            raise DataError(f"{here}: an assistant message needs content or tool_calls; add one, or take it out")
    elif role != "tool" and not message.get("content", "").strip():
        raise DataError(f"{here}: a {role} message needs content; add it, or take the message out")
    elif "content" not in message:
        raise DataError(f'{here}: a tool message needs content, the result of the call; write "" if it is empty')


def _check_order(role: str, before: Sequence[Message], here: str) -> None:
    if role == "system" and before:
        raise DataError(f"{here}: a system message comes first; move its text to the beginning of the conversation")
    if role == "assistant" and not before:
        raise DataError(f"{here}: a conversation begins with a system or user message; put one in front")
    if role == "assistant" and before[-1]["role"] == "assistant":
        raise DataError(f"{here}: an assistant message follows another one; join the two, or put a message in between")


def _calls(given: Any, here: str) -> list[dict[str, Any]]:
    if not given:
        return []
    if not isinstance(given, list):
        raise DataError(f"{here}: tool_calls is {given!r:.100}; it has to be a list of {_CALL}")
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise DataError(f"{here}, tool_calls[{number}]: it is {call!r:.100}; a call is {_CALL}")
        try:
            arguments = call_arguments(function.get("arguments"))
        except DataError as error:
            raise DataError(f"{here}, tool_calls[{number}]: {error}") from error
        # A call needs no id. If it has one, results find it by that, so no two may be the same.
        identity = call.get("id") or None
        if identity is not None and identity in [other.get("id") for other in calls]:
            raise DataError(f"{here}, tool_calls[{number}]: two calls have the id {identity!r:.100}; change one")
        known = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(known if identity is None else {"id": identity, **known})
    return calls


def _answered(
    result: dict[str, Any], open_calls: dict[int, dict[str, Any]], results: Mapping[int, Any], here: str
) -> int:
    """Which call of the last turn a result answers: that of its `tool_call_id`, or without one, the next."""
    if not open_calls:
        raise DataError(
            f"{here}: a tool result without a call: "
            + ("all calls before it have a result" if results else "no call comes before it")
            + "; take it out, or put its call into the assistant message before it"
        )
    identity = result.get("tool_call_id")
    matching = [n for n, call in open_calls.items() if not identity or call.get("id") == identity]
    if not matching:
        known = ", ".join(_named(call) for call in open_calls.values())
        raise DataError(
            f"{here}: tool_call_id is {identity!r:.100}, but the calls without a result are {known}; give it the id of "
            "its call"
        )
    name = open_calls[matching[0]]["function"]["name"]
    if result.get("name", name) != name:
        raise DataError(
            f"{here}: it is a result of {result['name']!r:.100}, but its call is one of {name!r:.100}; correct its "
            "name, or its tool_call_id"
        )
    return matching[0]


def _named(call: Mapping[str, Any]) -> str:
    name = call["function"]["name"]
    return f"{call['id']!r:.100} of {name!r:.100}" if call.get("id") else f"a call of {name!r:.100}"


def _trained(messages: Sequence[dict[str, Any]], where: str) -> frozenset[int]:
    """The assistant messages whose `train` is not false, which is then taken out."""
    turns = {
        place: message.pop("train", True) for place, message in enumerate(messages) if message["role"] == "assistant"
    }
    if not turns:
        raise DataError(f"{where}: the conversation has no assistant message to train on; add one, or take the row out")
    if not any(turns.values()):
        raise DataError(
            f"{where}: all assistant messages have train false, so there is nothing to train on; take the row out"
        )
    return frozenset(place for place, train in turns.items() if train)


def _tools(given: Any, where: str) -> tuple[Tool, ...]:
    """The tools of a row, from a list of them or its JSON text."""
    if isinstance(given, str) and given:
        with translated(Malformed, lambda error: DataError(f"{where}, tools: it is a text, but no JSON: {error}")):
            given = read_json(given)
    if not given:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise DataError(f"{where}, tools: it is {given!r:.100}; it has to be a list of tools, or its JSON text")
    with translated(ConfigError, lambda error: DataError(f"{where}, tools: {error}")):
        return _checked_tools(json.dumps(given))


@lru_cache(maxsize=256)  # as a rule, all rows have the same tools
def _checked_tools(given: str) -> tuple[Tool, ...]:
    tools = json.loads(given)
    for name, parameters in tool_schemas(tools).items():
        ArgumentChecker(parameters, f"the tool {name!r:.100}")
    return tuple(tools)
