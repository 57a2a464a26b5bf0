"""Turns of a policy that are drawn at random and written by hand: what is in them is known without reading them.

A turn is a list of pieces, each encoded by itself, so the tokens of every call are known. A text is spelled with
ordinary tokens, as a policy can sample it, also where it looks like a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from verl.agent.formats import Format

TOOLS = ("fetch", "look", "count")


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A tokenizer with a chat template, and what the tests know about the template without asking the code.

    `one_call`: calls are Llama's, one a turn. `thinks`: the template knows `<think>`. `result`: how the template writes
    the text of a result ("as it is", "json", "stripped").
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    forms: dict[str, Format]
    end: str
    one_call: bool = False
    thinks: bool = False
    result: str = "as it is"
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def added(self) -> dict[int, str]:
        """The text of each added token that is not white space."""
        added = {token: str(text) for token, text in self.tokenizer.added_tokens_decoder.items()}
        return {token: text for token, text in added.items() if text.strip()}

    @cached_property
    def token(self) -> dict[str, int]:
        return {text: token for token, text in self.added.items()}

    @cached_property
    def own(self) -> re.Pattern[str]:
        """Finds the added tokens in a text."""
        return re.compile(f"({'|'.join(map(re.escape, sorted(self.token, key=len, reverse=True)))})")

    @cached_property
    def stops(self) -> list[int]:
        """Tokens that end a turn: the template's own first, then those that chat models are known to end with."""
        texts = (self.end, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
        found = [self.token[text] for text in texts if text in self.token] + [self.tokenizer.eos_token_id]
        return list(dict.fromkeys(found))

    def spelled(self, text: str) -> tuple[int, ...]:
        """`text` by ordinary tokens only: each added token is cut behind its first character."""
        cuts = [match.start() + 1 for match in re.finditer(f"(?={self.own.pattern})", text)]
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = tuple(token for piece in pieces for token in self.tokenizer(piece, add_special_tokens=False)["input_ids"])
        assert not any(token in self.added for token in ids), text
        return ids

    def tag(self, text: str) -> tuple[int, ...]:
        """A tag: its token, or where it has none, its characters."""
        return (self.token[text],) if text in self.token else self.spelled(text)

    def read(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def hostile_texts(model: Model) -> st.SearchStrategy[str]:
    """What a tool, a user or a page may say to get control tokens into a context; halves of surrogate pairs too."""
    literals = [text for text in model.token if "reserved" not in text]
    halves = [part for text in literals[:6] for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    others = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "[/RESULT]",
              "assistant\n", "user", "\n", " ", "\t", '"}}', "{", "\\", "'", "{{ x }}", "{% raw %}", "a", "sea",
              "\u4eac", "\U0001f600", "\u00e9", "e\u0301", "\ud83d", "\udc00", "\x00", "\x1c", "\u2028", "~o0~", "~",
              '{"name": "fetch", "arguments": {"number": 1}}']  # fmt: skip
    parts = st.one_of(st.sampled_from(literals), st.sampled_from(halves), st.sampled_from(others))
    return st.lists(parts, max_size=7).map("".join)


@dataclass(frozen=True)
class Piece:
    """A part of a turn. `kind` is "think", "/think", "text", "call", "/call" or "body"."""

    kind: str
    ids: tuple[int, ...]
    drawn: DrawnCall | None = None


@dataclass(frozen=True)
class DrawnCall:
    """A call as it was drawn: its text, and its status where it is written to its end."""

    text: str
    status: str


@dataclass(frozen=True)
class KnownCall:
    """A call of a turn, with its place among the turn's tokens."""

    status: str
    span: tuple[int, int]
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownTurn:
    """The ids of a turn, and what is in it. `finished`: it ends with a token that ends turns."""

    ids: tuple[int, ...]
    finished: bool
    reasoning: str
    content: str
    calls: tuple[KnownCall, ...]


@st.composite
def drawn_calls(draw: Any, model: Model, numbers: st.SearchStrategy[int]) -> DrawnCall:
    """`numbers` are those of the answers that the tools fetch and look give."""
    key = "parameters" if model.one_call and draw(st.booleans()) else "arguments"
    notes = hostile_texts(model).map(lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    if "</tool_call>" not in model.token and not model.one_call:  # there, the first closing tag ends a call
        notes = notes.map(lambda text: text.replace("tool_call>", ""))
    kind = draw(st.sampled_from(["ok"] * 8 + ["unknown_tool", "invalid_arguments", "missing_name", "invalid_json"]))
    name = draw(st.sampled_from(TOOLS))
    arguments: Any = {} if name == "count" else {"number": draw(numbers)}
    if name != "count" and draw(st.booleans()):
        arguments["note"] = draw(notes)
    dump = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, None, 1]))}
    if kind == "ok":
        return DrawnCall(json.dumps({"name": name, key: arguments}, **dump), kind)
    if kind == "unknown_tool":
        name = draw(notes.filter(lambda text: text not in ("", *TOOLS)))
        return DrawnCall(json.dumps({"name": name, key: arguments}, **dump), kind)
    if kind == "invalid_arguments":
        bad = [{}, {"number": "1"}, {"number": 1, "other": draw(notes)}, {"number": None}, [1], None, "x"]
        arguments = {"number": 1} if name == "count" else draw(st.sampled_from(bad))
        return DrawnCall(json.dumps({"name": name, key: arguments}, **dump), kind)
    if kind == "missing_name":
        nameless = draw(st.sampled_from([{}, {"name": ""}, {"name": None}, {"name": 3}]))
        return DrawnCall(json.dumps({**nameless, key: arguments}, **dump), kind)
    start = f'{{"name": "{name}", "{key}": {{"number": '
    # a format without tags takes for a call only what begins as one
    broken = [f"{start}NaN}}}}", f"{start}1e999}}}}", f'{start}"\\ud83d"}}}}', f"{start}1}}}} bye", f"{start}}}}}",
              f'{{"name": "{name}", "name": "{name}", "{key}": {{}}}}', f'{{"name": "{name}", "{key}": {{}},}}',
              f"{start}'1'}}}}"]  # fmt: skip
    if not model.one_call:
        broken += ["", " \n", "[1]", "3", f"{{'name': '{name}'}}", f"{start}1}}", name, draw(notes) + "!"]
    return DrawnCall(draw(st.sampled_from(broken)), kind)


@st.composite
def drawn_pieces(draw: Any, model: Model, numbers: st.SearchStrategy[int]) -> list[Piece]:
    """The pieces of a turn, without the token that ends it. There may be none."""
    texts = hostile_texts(model).map(lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    pieces: list[Piece] = []

    def add(kind: str, ids: tuple[int, ...], drawn: DrawnCall | None = None) -> None:
        pieces.append(Piece(kind, ids, drawn))

    # Thinking, at times without one of its tags, or with a call in it.
    if model.thinks and draw(st.booleans()):
        opened, closed = draw(st.sampled_from([(True, True)] * 4 + [(True, False), (False, True)]))
        if opened:
            add("think", (model.token["<think>"],))
        thought = draw(st.just("") | texts)
        # without its first tag, thinking is what comes before a call; a tag that is no token is one wherever it stands
        add("text", model.spelled(thought if opened else thought.replace("<tool_call>", "")))
        if opened and draw(st.integers(0, 4)) == 0:
            add("text", model.tag("<tool_call>") + model.spelled('{"name": "fetch"}') + model.tag("</tool_call>"))
        if closed:
            add("/think", (model.token["</think>"],))
    # What is said and called.
    if model.one_call:
        is_call = draw(st.integers(0, 3)) > 0
        tagged = is_call and draw(st.booleans())
        if not is_call or (tagged and draw(st.booleans())):
            add("text", model.spelled(draw(texts.filter(lambda text: not text.strip().startswith("{")))))
        if tagged:
            add("call", model.tag("<|python_tag|>"))
        elif is_call:
            add("text", model.spelled(draw(st.sampled_from(["", "\n", " "]))))
        if is_call:
            call = draw(drawn_calls(model, numbers))
            add("body", model.spelled(call.text), call)
        return pieces
    if "</tool_call>" not in model.token:
        texts = texts.map(lambda text: text.replace("tool_call>", ""))
    for number in range(draw(st.sampled_from([1, 1, 2, 3, 4, 0]))):
        what = draw(st.sampled_from(["call"] * 6 + ["text", "text", "unclosed", "token"]))
        if what == "text":
            add("text", model.spelled(draw(texts)))
        elif what == "token":  # that acts for a model, but not in a turn
            stops = {*model.stops, *map(model.token.get, ("<tool_call>", "</tool_call>", "<think>", "</think>"))}
            if inert := sorted(set(model.added) - stops):
                add("text", (draw(st.sampled_from(inert[:40])),))
        else:
            call = draw(drawn_calls(model, numbers))
            pad = draw(st.sampled_from(["", "\n", " \n"]))
            add("call", model.tag("<tool_call>"))
            add("body", model.spelled(pad + call.text + pad), call)
            if what == "call":
                add("/call", model.tag("</tool_call>"))
                if number == 0 and draw(st.integers(0, 5)) == 0:  # one more than there are calls is text
                    add("text", model.tag("</tool_call>"))
    return pieces


@st.composite
def drawn_turns(draw: Any, model: Model, numbers: st.SearchStrategy[int]) -> KnownTurn:
    """A turn that ends by itself, or is cut off anywhere."""
    pieces = draw(drawn_pieces(model, numbers))
    size = sum(len(piece.ids) for piece in pieces)
    # without tags, what is cut off may as well be broken before
    broken = model.one_call and any(piece.drawn and piece.drawn.status == "invalid_json" for piece in pieces)
    if size > 1 and not broken and draw(st.integers(0, 3)) == 0:
        return known_turn(model, _first(pieces, draw(st.integers(1, size))), None)
    return known_turn(model, pieces, draw(st.sampled_from([model.stops[0], *model.stops])))


def answer_turn(model: Model) -> KnownTurn:
    return known_turn(model, [Piece("text", model.spelled("It is the sea."))], model.stops[0])


def _first(pieces: list[Piece], size: int) -> list[Piece]:
    """The first `size` tokens. What is left of a tag is text."""
    left: list[Piece] = []
    for piece in pieces:
        ids, size = piece.ids[:size], size - len(piece.ids)
        whole = len(ids) == len(piece.ids)
        left.append(piece if whole else Piece("body" if piece.kind == "body" else "text", ids))
        if size <= 0:
            break
    return left


def known_turn(model: Model, pieces: list[Piece], stop: int | None) -> KnownTurn:
    """The turn of these pieces, ended by the token `stop`."""
    ids = tuple(token for piece in pieces for token in piece.ids)
    reasoning, said = _without_thinking(model, pieces)
    place = len(ids) - sum(len(piece.ids) for piece in said)
    tagged = any(piece.kind == "call" for piece in said)
    calls: list[KnownCall] = []
    text = ""
    opened: tuple[int, Piece | None] | None = None  # the place and the body of a call that is not closed yet
    for piece in said:
        before, place = place, place + len(piece.ids)
        if piece.kind == "call":
            if opened is not None:
                calls.append(KnownCall("unclosed", (opened[0], before)))
            opened = before, None
        elif piece.kind == "body" and model.one_call:
            if tagged or re.match(r'\{\s*"(name|parameters|arguments)"\s*:', model.read(piece.ids)):
                blank = 0  # tokens at the end of a call that was cut off; without a tag, they are no part of it
                while not tagged and not model.read(piece.ids[-1 - blank :]).strip():
                    blank += 1
                calls.append(_known_call(model, piece, (opened[0] if opened else before, place - blank)))
                text, opened = text if tagged else "", None
            else:  # cut off before it can be seen to be a call
                text += model.read(piece.ids)
        elif piece.kind == "body" and opened:
            opened = opened[0], piece
        elif piece.kind == "/call" and opened and opened[1]:
            calls.append(_known_call(model, opened[1], (opened[0], place)))
            opened = None
        elif opened is None:
            text += model.read(piece.ids)
    if opened is not None:
        calls.append(KnownCall("unclosed", (opened[0], len(ids))))
    ended = ids if stop is None else (*ids, stop)
    return KnownTurn(ended, stop is not None, reasoning.strip(), text.strip(), tuple(calls))


def _known_call(model: Model, body: Piece, span: tuple[int, int]) -> KnownCall:
    """A call whose body ends where it was drawn to end. Its texts are those that the tokenizer has made of them."""
    if body.drawn is None:
        return KnownCall("unclosed", span)
    if body.drawn.status not in ("ok", "unknown_tool", "invalid_arguments"):
        return KnownCall(body.drawn.status, span)
    read = json.loads(model.read(body.ids))
    arguments = read.get("arguments", read.get("parameters"))
    return KnownCall(body.drawn.status, span, read["name"], arguments if isinstance(arguments, dict) else {})


def _without_thinking(model: Model, pieces: list[Piece]) -> tuple[str, list[Piece]]:
    """What is thought, and the pieces behind it."""
    kinds = [piece.kind for piece in pieces]
    if "/think" in kinds:
        close = kinds.index("/think")
        return "".join(model.read(piece.ids) for piece in pieces[:close] if piece.kind != "think"), pieces[close + 1 :]
    if kinds[:1] == ["think"]:
        return "".join(model.read(piece.ids) for piece in pieces[1:]), []
    return "", pieces
