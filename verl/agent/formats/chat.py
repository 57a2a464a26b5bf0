"""Formats of chat models, built from the model's own chat template: Hermes calls in ChatML, Qwen3, Qwen3.5, Llama 3.

A context grows by `bridge`, and stays as it was sampled. It is what the template would write for the same conversation
at once, but for what a policy may write and a template does not:

- a turn may have white space where the template strips it or writes other, spell a text with other tokens, or end with
  another stop token than the template's;
- a tokenizer may join the line breaks at the end of the generation prompt with one that the turn begins with, and some
  encode two of them in another way where a turn follows;
- an empty block of thinking stays until a user message comes, also where the template leaves it out;
- Llama's template leaves out what is said beside a call.

Thinking is in the context as `thinking` says. "all" keeps it; "tool_cycle" keeps it until a user message comes;
"template" does what the chat template does. Where it has to go, `bridge` returns None.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Literal

from verl.agent.formats.calls import (
    Malformed,
    Piece,
    character_counts,
    failed,
    json_call,
    read_json,
    split_at_tags,
    tokens_of,
    tool_schemas,
    xml_call,
)
from verl.agent.formats.interface import Call, CallStatus, Format, Message, ParsedTurn, Rendered, Tool
from verl.agent.formats.template import Template, Written
from verl.agent.text import whole_characters
from verl.errors import ConfigError, DataError

Thinking = Literal["all", "tool_cycle", "template"]

_STOPS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_QUESTION: Message = {"role": "user", "content": "?"}
_ANSWER, _THOUGHT, _RESULT = "what-the-assistant-said", "what-the-assistant-thought", "what-the-tool-returned"
_ANSWERED: Message = {"role": "assistant", "content": _ANSWER}
_RETURNED: Message = {"role": "tool", "content": _RESULT}


class TemplateFormat(Format):
    """What the formats share: rendering and bridging by the chat template.

    Raises `ConfigError` if the template does not end an assistant turn with an added token, or does not begin it as the
    generation prompt does.
    """

    def __init__(self, template: Template, thinking: Thinking = "template") -> None:
        self.template = template
        # Where an assistant turn begins and ends, as the template itself writes a conversation of two of them.
        self._prompt = template.write([_QUESTION])
        two_turns = template.write([_QUESTION, _ANSWERED, _QUESTION])
        template.check_tokens(two_turns)
        follows = two_turns.after(_ANSWER)
        end = template.first_token(follows) if follows else None
        if (
            end is None
            or end.start()
            or template.write([_QUESTION, _ANSWERED], prompt=False).without_start(self._prompt) is None
        ):
            raise ConfigError(
                "the chat template does not write an assistant turn as the generation prompt, the text, and a token "
                "that ends it, so a context cannot be continued exactly; set a chat template that does"
            )
        self._end = end[0]
        # A turn ends at this token, and at those by which models of other templates end theirs.
        stops = [template.token(text) for text in (self._end, *_STOPS)] + [template.tokenizer.eos_token_id]
        self.stop_token_ids = tuple(dict.fromkeys(token for token in stops if token is not None))
        # How long thinking stays in the context.
        self._template_keeps = {"user": self._keeps(_ANSWERED, _QUESTION), "tool": self._keeps(_ANSWERED, _RETURNED)}
        modes = {
            "all": {"user": True, "tool": True},
            "tool_cycle": {"user": False, "tool": True},
            "template": self._template_keeps,
        }
        if thinking not in modes:
            raise ConfigError(f"thinking is {thinking!r}; use one of {', '.join(modes)}")
        self._keep = modes[thinking]

    def _keeps(self, turn: Message, following: Message) -> bool:
        """Whether the template still writes the thinking of `turn` when `following` comes."""
        thought = {**turn, "reasoning_content": _THOUGHT}
        with contextlib.suppress(DataError):  # a template without tools may refuse their results
            return self.template.write([_QUESTION, thought, following]).after(_THOUGHT) is not None
        return False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        if not messages or messages[-1].get("role") == "assistant":
            raise DataError("a conversation to render ends with a user message or a tool result")
        tool_schemas(tools)
        last_user = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        first_kept = 0 if self._keep["user"] else last_user
        kept = [
            message if place >= first_kept else {**message, "reasoning_content": ""}
            for place, message in enumerate(messages)
        ]
        # turns whose thinking stays although the template, with what has come since, would drop it
        dropped = any(
            (message.get("reasoning_content") or "<think>" in self._prompt.text)
            and not self._template_keeps["user" if place < last_user else "tool"]
            and self._keep["user" if place < last_user else "tool"]
            for place, message in enumerate(kept)
            if message.get("role") == "assistant"
        )
        written = self._turn_by_turn(kept, tools, first_kept) if dropped else [self.template.write(kept, tools)]
        ids = tuple(token for part in written for token in self.template.encode(part))
        return Rendered(ids, whole_characters("".join(part.text for part in written)))

    def _turn_by_turn(self, messages: Sequence[Message], tools: Sequence[Tool], first: int) -> list[Written]:
        """What the template writes for the messages up to `first` at once, and for later ones turn by turn, when it
        has not dropped their thinking yet."""
        turns = [place for place in range(first, len(messages)) if messages[place].get("role") == "assistant"]
        written = [self.template.write(messages[: turns[0]], tools)]
        for place, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            written += [self._turn(messages[place]), self._following(messages[place + 1 : following])]
        return written

    def bridge(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...] | None:
        roles = {message.get("role") for message in messages}
        if not roles or not roles <= {"user", "tool"}:
            raise DataError(f"a context continues with user messages and tool results, not {sorted(map(str, roles))}")
        if not self._keep["user" if "user" in roles else "tool"] and self._has_thinking(ids):
            return None
        following = self.template.encode(self._following(messages))
        return following[1:] if ids and ids[-1] in self.stop_token_ids else following

    def turn(self, message: Message) -> tuple[int, ...]:
        return (*self.template.encode(self._turn(message)), self.stop_token_ids[0])

    def _following(self, messages: Sequence[Message]) -> Written:
        """What follows the text of an assistant turn, from the token that ends it to the next generation prompt, or to
        the end if no message follows."""
        written = self.template.write([_QUESTION, _ANSWERED, *messages], prompt=bool(messages)).after(_ANSWER)
        end = self.template.first_token(written) if written else None
        if written is None or end is None:
            raise DataError("the chat template does not write these messages behind the assistant's turn")
        return Written((written.parts[0][end.start() :], *written.parts[1:]))

    def _turn(self, message: Message) -> Written:
        """The assistant's `message` as the template writes it after the generation prompt, without the end token."""
        refused = DataError(
            "the chat template does not write this assistant message behind the generation prompt, or leaves out its "
            "thinking"
        )
        for following in ([_RETURNED], []):  # without thinking, Qwen3 writes an empty block in the last turn only
            try:
                written = self.template.write([_QUESTION, message, *following], prompt=bool(following))
                rest = written.without_start(self._prompt)
                # What remains between the prompt and the end of the turn is the turn.
                turn = rest and rest.without_end(self._following(following))
            except DataError as error:
                refused = error
                continue
            # The template may have dropped the thinking for what follows: then try it with nothing behind the turn.
            if turn and str(message.get("reasoning_content") or "").strip() in turn.text:
                return turn
        raise refused

    def _has_thinking(self, ids: Sequence[int]) -> bool:
        return False


class ChatML(TemplateFormat):
    """Hermes calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5 and many others write them.

    A turn may have any number of them, between texts.
    """

    _tags: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedTurn:
        tool_schemas(tools)
        read = split_at_tags(self.template.tokenizer, before_stop(ids, self.stop_token_ids), self._tags)
        reasoning, pieces = self._without_thinking(read)
        calls: list[Call] = []
        content = ""
        place = 0
        while place < len(pieces):
            piece = pieces[place]
            if not (piece.is_tag and piece.text == "<tool_call>"):
                content += piece.text
                place += 1
                continue
            # the body of a call reaches to the next tag of calls, or to the end of the turn
            close = place + 1
            while close < len(pieces) and not (pieces[close].is_tag and pieces[close].text.endswith("tool_call>")):
                close += 1
            if close < len(pieces) and pieces[close].text == "</tool_call>":
                body = "".join(piece.text for piece in pieces[place + 1 : close])
                calls.append(self._call(body, (piece.start, pieces[close].end), tools))
                place = close + 1
            else:
                span = (piece.start, pieces[close - 1].end)
                calls.append(failed(CallStatus.UNCLOSED, span, "the call has no </tool_call>"))
                place = close
        return ParsedTurn(reasoning.strip(), content.strip(), tuple(calls))

    def _call(self, body: str, span: tuple[int, int], tools: Sequence[Tool]) -> Call:
        return json_call(body, span, tools)

    def _without_thinking(self, pieces: list[Piece]) -> tuple[str, list[Piece]]:
        return "", pieces


class Qwen3(ChatML):
    """Hermes calls of a model that thinks between `<think>` and `</think>` before it says something.

    The thinking of a turn is all before its first `</think>`, if the turn (or its generation prompt) begins with
    `<think>`, or no call comes before. Without `</think>`, a turn that begins with `<think>` is thinking only. Calls
    within the thinking are no calls; later tags of thinking are text. Raises `ConfigError` if the tokenizer has no
    tokens for the two tags.
    """

    _tags = ("<think>", "</think>", *ChatML._tags)

    def __init__(self, template: Template, thinking: Thinking = "template") -> None:
        super().__init__(template, thinking)
        opening, closing = template.token("<think>"), template.token("</think>")
        if opening is None or closing is None:
            raise ConfigError(
                "the chat template writes <think>, which is no token of the tokenizer, so thinking cannot be found "
                "exactly; add <think> and </think> to the tokenizer, or set a chat template without thinking"
            )
        self.think_ids = (opening, closing)
        text = self._prompt.text
        self.prompt_thinks = text.rfind("<think>") > text.rfind("</think>")

    def _has_thinking(self, ids: Sequence[int]) -> bool:
        return not set(self.think_ids or ()).isdisjoint(ids)

    def _without_thinking(self, pieces: list[Piece]) -> tuple[str, list[Piece]]:
        tags = [piece.text if piece.is_tag else "" for piece in pieces]
        # A turn begins with thinking if the opening tag is the first thing that is not blank.
        first = next((place for place, piece in enumerate(pieces) if piece.is_tag or piece.text.strip()), None)
        begins = first is not None and tags[first] == "<think>"
        if "</think>" not in tags:
            thought = len(tags) if begins or self.prompt_thinks else 0
            rest = thought
        else:
            thought = tags.index("</think>")
            rest = thought + 1
            # A call came first, so that nothing before the closing tag is thinking.
            if not begins and not self.prompt_thinks and "<tool_call>" in tags[:thought]:
                return "", pieces
        start = first + 1 if begins and first is not None else 0
        return "".join(piece.text for piece in pieces[start:thought]), pieces[rest:]


class Qwen35(Qwen3):
    """Calls as XML, as Qwen3.5 and Qwen3-Coder write them: `<tool_call><function=name><parameter=key>value</parameter>
    </function></tool_call>`."""

    def _call(self, body: str, span: tuple[int, int], tools: Sequence[Tool]) -> Call:
        return xml_call(body, span, tools)


_BEGINS_A_CALL = re.compile(r'\{\s*"(type|name|parameters|arguments)"\s*:')
_CALL_KEYS = ("parameters", "arguments")


class Llama3(TemplateFormat):
    """Calls of Llama 3: the turn is a JSON object `{"name": ..., "parameters": {...}}`, or one follows
    `<|python_tag|>`. One call a turn.

    Without `<|python_tag|>`, a JSON object without "parameters" (or "arguments") is an answer, not a call.
    """

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedTurn:
        tool_schemas(tools)
        inner = before_stop(ids, self.stop_token_ids)
        pieces = split_at_tags(self.template.tokenizer, inner, ("<|python_tag|>",))
        # Behind the tag stands a call, whatever it looks like; before it, what is said.
        tag = next((place for place, piece in enumerate(pieces) if piece.is_tag), None)
        if tag is not None:
            said = "".join(piece.text for piece in pieces[:tag])
            body = "".join(piece.text for piece in pieces[tag + 1 :])
            return ParsedTurn("", said.strip(), (self._call(body, (pieces[tag].start, pieces[-1].end), tools),))
        # Without a tag, the whole turn is a call or an answer.
        text = pieces[0].text if pieces else ""
        if not _is_call(text):
            return ParsedTurn("", text.strip(), ())
        start = len(text) - len(text.lstrip())
        span = tokens_of(character_counts(self.template.tokenizer, inner), start, len(text.rstrip()))
        return ParsedTurn("", "", (self._call(text, span, tools),))

    def _call(self, body: str, span: tuple[int, int], tools: Sequence[Tool]) -> Call:
        call = json_call(body, span, tools, _CALL_KEYS)
        if call.status is CallStatus.INVALID_JSON and _is_cut_off(body.lstrip(), call.detail):
            return failed(CallStatus.UNCLOSED, span, f"the call has no end: {call.detail}")
        if call.detail.startswith("Extra data"):
            return failed(CallStatus.INVALID_JSON, span, "a turn with a call is one JSON object and nothing else")
        return call


def _is_call(text: str) -> bool:
    """Whether a turn without a tag is a call: a JSON object with parameters, or what begins as one."""
    try:
        value = read_json(text)
    except Malformed:
        return _BEGINS_A_CALL.match(text.strip()) is not None
    return isinstance(value, dict) and not set(value).isdisjoint(_CALL_KEYS)


_CUT_OFF = re.compile(r"\s*|t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|(?<=\d)(\.|[eE][+-]?)")
_CUT_OFF_ESCAPE = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")


def _is_cut_off(text: str, error: str) -> bool:
    """Whether a JSON text of which `error` says what is wrong is the beginning of one that is right."""
    position = re.search(r" at character (\d+)$", error)
    if position is None or error.startswith("Unterminated"):
        return position is not None
    rest = _CUT_OFF_ESCAPE if error.startswith("Invalid \\u") else _CUT_OFF
    return rest.fullmatch(text, int(position[1])) is not None


def before_stop(ids: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    """The tokens of a turn before its first stop token."""
    return ids[: next((place for place, token in enumerate(ids) if token in stops), len(ids))]
