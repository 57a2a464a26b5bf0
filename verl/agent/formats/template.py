"""A chat template as a writer of token ids, in which text from outside cannot act.

The template itself is run, so its own rules (what it strips, escapes, or leaves out) apply. Before that, each text from
outside is put between two marks, and each added token that is spelled in it is broken by a third. The template thus
sees no control token in such a text, and what it has written falls into its own parts and those from outside. Only its
own parts then give added tokens. Harmless texts give the same ids as the whole text does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from verl.agent.formats.interface import Message, Tool
from verl.agent.text import TEMPLATE_ERRORS, added_tokens, encode_outside, encode_text
from verl.errors import ConfigError, DataError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Written:
    """What a template wrote: its own parts at even places, those from outside at odd ones."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def without_start(self, start: Written) -> Written | None:
        """What follows `start`. None if this does not begin with `start`."""
        last = len(start.parts) - 1
        if self.parts[:last] != start.parts[:last] or len(self.parts) <= last:
            return None
        if not self.parts[last].startswith(start.parts[last]):
            return None
        return Written((self.parts[last][len(start.parts[last]) :], *self.parts[last + 1 :]))

    def without_end(self, end: Written) -> Written | None:
        """What comes before `end`. None if this does not end with `end`."""
        turned = Written(tuple(part[::-1] for part in reversed(self.parts)))
        rest = turned.without_start(Written(tuple(part[::-1] for part in reversed(end.parts))))
        return rest and Written(tuple(part[::-1] for part in reversed(rest.parts)))

    def after(self, text: str) -> Written | None:
        """What follows the first part from outside that is `text`. None if there is none."""
        places = [place for place in range(1, len(self.parts), 2) if self.parts[place] == text]
        return Written(self.parts[places[0] + 1 :]) if places else None


class Template:
    """The chat template of a tokenizer. `options` are further variables of the template, such as `enable_thinking`.

    Raises `ConfigError` if the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, which tool calls need; use the tokenizer of an instruction-tuned "
                "model, or an environment whose actions are tags"
            )
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self._literals = {text: token for token, text in added_tokens(tokenizer).items()}
        self._own = re.compile("|".join(map(re.escape, sorted(self._literals, key=len, reverse=True))) or r"(?!)")
        broken = "|".join(map(re.escape, sorted({*self._literals, *_TAGS}, key=len, reverse=True)))
        self._spelled = re.compile(f"(?=({broken}))")
        # A text that begins or ends with a part of a token could complete it together with the template's own text.
        self._ends = tuple({text[:size] for text in self._literals for size in range(1, len(text))})
        self._starts = tuple({text[size:] for text in self._literals for size in range(1, len(text))})

    def token(self, text: str) -> int | None:
        """The id of the added token that is spelled `text`."""
        return self._literals.get(text)

    def write(self, messages: Sequence[Message], tools: Sequence[Tool] = (), prompt: bool = True) -> Written:
        """What the template writes; `prompt` is whether the generation prompt follows. Raises `DataError`."""
        chat = [_known(message) for message in messages]
        marks = _Marks.for_texts([chat, list(tools)])

        def mark(text: str) -> str:
            return marks.around(text, self._spelled) if text.strip() else text

        def mark_if_suspicious(text: str) -> str:
            acts = self._spelled.search(text) or text.startswith(self._starts) or text.endswith(self._ends)
            return mark(text) if acts else text

        # Each text of a message is marked; those of tools only where they could act as a control token.
        what = "the chat template cannot write these messages"
        with translated(TEMPLATE_ERRORS, lambda error: DataError(f"{what}: {type(error).__name__}: {error}")):
            text = self.tokenizer.apply_chat_template(
                [_marked(message, mark) for message in chat],
                tools=[_replaced(tool, mark_if_suspicious, fixed=_TYPE) for tool in tools] or None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.options,
            )
        return marks.read(str(text))

    def encode(self, written: Written) -> tuple[int, ...]:
        """The ids of what the template wrote: added tokens come out of its own parts only."""
        ids: list[int] = []
        text = ""  # since the last added token
        for place, part in enumerate(written.parts):
            start = 0
            for found in () if place % 2 else self._own.finditer(part):
                ids += [*encode_outside(self.tokenizer, text + part[start : found.start()]), self._literals[found[0]]]
                text, start = "", found.end()
            text += part[start:]
        return (*ids, *encode_outside(self.tokenizer, text))

    def first_token(self, written: Written) -> re.Match[str] | None:
        """Where the first added token is in what the template wrote, if that is in its first part."""
        return self._own.search(written.parts[0])

    def check_tokens(self, written: Written) -> None:
        """Raises `ConfigError` if an added token of the template changes how the text beside it is encoded."""
        for literal in set(self._own.findall("\n".join(written.parts[::2]))):
            beside = (encode_text(self.tokenizer, "a "), encode_text(self.tokenizer, "\nb"))
            apart = (*beside[0], self._literals[literal], *beside[1])
            if encode_text(self.tokenizer, f"a {literal}\nb") != apart:
                raise ConfigError(
                    f"the tokenizer takes white space beside {literal!r}, or encodes what follows in another way, so a "
                    "context cannot be continued exactly; use the tokenizer of another model"
                )


@dataclass(frozen=True)
class _Marks:
    """Texts that no template strips, folds or escapes, and that occur in no text of the messages."""

    secret: str  # a hash of the texts, which thus cannot have it in them

    @classmethod
    def for_texts(cls, value: Any) -> _Marks:
        texts: list[str] = []
        _replaced(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        digest = sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
        return cls(digest[:24])

    def around(self, text: str, spelled: re.Pattern[str]) -> str:
        """`text` between marks, but for the white space around it, with tokens broken behind their first character."""
        core = text.strip()
        start = text.index(core)
        cuts = [match.start() + 1 for match in spelled.finditer(core)]
        pieces = [core[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(core)], strict=True)]
        inner = f"~b{self.secret}~".join(pieces)
        return f"{text[:start]}~o{self.secret}~{inner}~c{self.secret}~{text[start + len(core) :]}"

    def read(self, text: str) -> Written:
        """The parts of a text with marks. Raises `DataError` if the template cut a text from outside in pieces."""
        parts = re.split(f"~([oc]){self.secret}~", text)
        if parts[1::2] != ["o", "c"] * (len(parts) // 4):
            raise DataError("the chat template cuts a text of the messages in pieces, which cannot be encoded safely")
        return Written(tuple(part.replace(f"~b{self.secret}~", "") for part in parts[::2]))


def _known(message: Message) -> dict[str, Any]:
    """`message` with the fields that templates know. Raises `DataError` if it is not in the form of `Message`."""
    if message.get("role") not in ROLES:
        raise DataError(f"a message has the role {message.get('role')!r}; use one of {', '.join(ROLES)}")
    known = {field: message[field] for field in _FIELDS if message.get(field)}
    known["content"] = message.get("content") or ""
    for field in ("content", "reasoning_content"):
        if not isinstance(known.get(field, ""), str):
            raise DataError(f"the {field} of a {known['role']} message is {type(known[field]).__name__}, not a text")
    return known


def _marked(message: dict[str, Any], mark: Callable[[str], str]) -> dict[str, Any]:
    """`message` with its texts marked: all but the role, and the types of its tool calls."""
    role, others = {"role": message["role"]}, {name: part for name, part in message.items() if name != "role"}
    return role | {name: _replaced(part, mark, fixed=_TYPE) for name, part in others.items()}


def _replaced(value: Any, new: Callable[[str], str], fixed: tuple[str, str] | None = None) -> Any:
    """`value` with `new(text)` for each text in it, keys included, but for the key and value `fixed` on top."""
    if isinstance(value, str):
        return new(value)
    if isinstance(value, Mapping):
        return {
            (name if name in _STRUCTURE else _replaced(name, new)): part
            if (name, part) == fixed
            else _replaced(part, new)
            for name, part in value.items()
        }
    return [_replaced(part, new, fixed) for part in value] if isinstance(value, Sequence) else value


_TYPE = ("type", "function")
_STRUCTURE = frozenset({"type", "function", "name", "arguments", "id", "role", *_FIELDS})
"""Keys of messages and tools that templates look up. As keys of arguments they are harmless as they are."""
