"""A whole conversation as token ids, in the sequences that a rollout would have, and messages from the ids of turns.

The context grows as that of an episode: what comes before the first assistant message is rendered, an assistant message
is a turn, and `bridge` writes the messages that follow. Where the context may not be kept (a chat template drops old
thinking when a user message comes), a further sequence begins with the conversation rendered anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from verl.agent.formats.calls import Malformed, read_json
from verl.agent.formats.interface import Call, CallStatus, Format, Message, ParsedTurn, Tool
from verl.errors import DataError, translated
from verl.protocol import Source


class Part(NamedTuple):
    """A run of token ids of a sequence. `message` is the place in the conversation, from 0, of the assistant message
    that a part of source POLICY is, and None for other parts."""

    source: Source
    ids: tuple[int, ...]
    message: int | None = None


def write_conversation(form: Format, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[list[Part]]:
    """The sequences of a conversation. Each assistant message is in exactly one of them as a part of its own.

    The first sequence begins with a part of source PROMPT, a further one with one of source CONTEXT: the conversation
    so far. Messages that follow the last assistant message are not written. Raises `DataError`, which names the message
    by its place from 0, for what the chat template cannot write, and for an assistant message of which it would leave
    something out; `ConfigError` for tools as `Format.render` does.
    """
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    sequences: list[list[Part]] = []
    ids: list[int] = []
    start = 0  # of the messages since the last turn
    for place in turns:
        # What comes before the turn continues the context, or begins a sequence.
        more = None
        with _naming(start):
            if sequences:
                more = form.bridge(ids, messages[start:place])
            if more is None:
                opened = Part(Source.CONTEXT if sequences else Source.PROMPT, form.render(messages[:place], tools).ids)
                sequences.append([opened])
                ids = list(opened.ids)
            else:
                sequences[-1].append(Part(Source.ENVIRONMENT, more))
                ids += more
        # The turn has to be read as what the message says.
        with _naming(place):
            turn = form.turn(messages[place])
            _check_turn(form.parse(turn, tools), messages[place])
        sequences[-1].append(Part(Source.POLICY, turn, place))
        ids += turn
        start = place + 1
    return sequences


@contextlib.contextmanager
def _naming(place: int) -> Iterator[None]:
    """Context in which a `DataError` names the message."""
    with translated(DataError, lambda error: DataError(f"messages[{place}]: {error}")):
        yield


def _check_turn(read: ParsedTurn, message: Message) -> None:
    """Raises `DataError` if the turn of a message has other calls than it, or has lost its text or its thinking."""
    names = [str(call["function"]["name"]) for call in message.get("tool_calls") or []]
    found = [call.name for call in read.calls]
    if found != names:
        raise DataError(
            f"the turn that the chat template writes is read as calls of {found}, but the message calls {names}; take "
            "out what looks like a call in its texts, or names that no tool can have"
        )
    # Only whether there is a text: white space and characters may be written in another way.
    for field, text in (("content", read.content), ("reasoning_content", read.reasoning)):
        if bool(text) != bool(str(message.get(field) or "").strip()):
            raise DataError(
                f"the turn that the chat template writes is read with the {field} {text[:100]!r}, which is not that of "
                "the message; take the content out if it stands beside a call that the template writes alone, or what "
                "looks like thinking"
            )


def read_conversation(
    form: Format, given: Sequence[Sequence[Message]], turns: Sequence[Sequence[int]], tools: Sequence[Tool] = ()
) -> list[Message]:
    """The messages of a conversation from the ids of its turns, such as the policy segments of a rollout.

    `given[n]` are the messages before turn `n`: the prompt, then tool results in the order of the calls that they
    answer, or user messages; one more entry may follow the last turn. The inverse of `write_conversation`, but for
    white space around texts, characters that the tokenizer normalizes, and ids of calls without a result. A call has
    the id of its result, or where that has none, one that both are given here. Raises `DataError`, which names the turn
    from 0, for a call that is not in the format's syntax, for a turn that says nothing, and for results without a call.
    """
    if len(given) - len(turns) not in (0, 1):
        raise DataError(f"{len(turns)} turns have messages before each, and may have some after the last")
    messages: list[Message] = list(given[0]) if given else []
    for number, ids in enumerate(turns):
        try:
            turn = read_turn(form, ids, tools)
        except DataError as error:
            raise DataError(f"turn {number}: {error}") from error
        following = [dict(message) for message in (given[number + 1] if number + 1 < len(given) else ())]
        # Results answer the calls in their order.
        calls = turn.get("tool_calls", [])
        results = [message for message in following if message.get("role") == "tool"]
        if len(results) > len(calls):
            raise DataError(
                f"turn {number}: {len(results)} results follow its {len(calls)} calls; leave out the others"
            )
        for place, call in enumerate(calls):
            call["id"] = f"call_{number}_{place}"
            if place < len(results):
                call["id"] = results[place].get("tool_call_id") or call["id"]
                results[place]["tool_call_id"] = call["id"]
        messages += [turn, *following]
    return messages


def read_turn(form: Format, ids: Sequence[int], tools: Sequence[Tool] = ()) -> dict[str, Any]:
    """The assistant message of a turn: `role`, `content`, and where there are any, `reasoning_content` and
    `tool_calls`, whose arguments are objects.

    A call may name an unknown tool, or have arguments against its schema. Raises `DataError` for one that no message
    can say, such as one that is not in the format's syntax, and for a turn that says nothing.
    """
    read = form.parse(ids, tools)
    # What is wrong with a call of an unknown tool beside that is found with a tool of that name.
    unknown = dict.fromkeys(call.name for call in read.calls if call.status is CallStatus.UNKNOWN_TOOL)
    known = [*tools, *({"type": "function", "function": {"name": name}} for name in unknown)]
    read = form.parse(ids, known) if unknown else read
    if not read.content and not read.calls:
        raise DataError("it has neither a text nor a call, which an assistant message needs; leave it out")
    message = read.message()
    # Arguments against a schema can be said in a message; keys that a call does not have cannot.
    for call in read.calls:
        if call.status not in (CallStatus.OK, CallStatus.INVALID_ARGUMENTS):
            raise DataError(
                f"no message can say its call ({call.status}: {call.detail}); train it as ids, or leave it out"
            )
    if any(call.status is not CallStatus.OK for call in read.calls):
        again = form.parse(form.turn(message), known).calls
        for call, other in zip(read.calls, again, strict=True):
            if _said(call) != _said(other):
                raise DataError(f"no message can say its call ({call.detail}); train it as ids, or leave it out")
    return message


def _said(call: Call) -> tuple[Any, ...]:
    return call.name, call.arguments, call.status, call.detail


def call_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call as an object, from an object or its JSON text. Raises `DataError` for anything else."""
    if isinstance(value, str):
        with translated(Malformed, lambda error: DataError(f"arguments {value!r:.100} are no JSON object: {error}")):
            value = read_json(value)
    if not isinstance(value, dict):
        raise DataError(f"arguments {value!r:.100} are no JSON object; write them as {{...}}, or as its JSON text")
    return value
