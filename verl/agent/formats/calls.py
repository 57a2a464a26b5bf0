"""Tool calls in the text of a turn: where they are, what they say, and whether a tool takes them.

Places are those of tokens. A tag that is an added token of the tokenizer is found by its id only: the same characters
from ordinary tokens are text, as they are in an argument or a tool's result. A tag that the tokenizer has no token for
is found in the text, and there the first closing tag ends a call.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isinf
from typing import TYPE_CHECKING, Any

from jsonschema import exceptions
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from verl.agent.formats.interface import Call, CallStatus, Tool
from verl.agent.text import added_tokens, decode_ids
from verl.errors import ConfigError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_CHARACTER = "\ufffd"  # how bytes are decoded that are no character, or none yet
_LONGEST_DETAIL = 300  # characters: a message of a schema's validator repeats the arguments
_MOST_LEVELS, _TOO_DEEP = 100, "the JSON is nested too deeply"
_LONGEST_INTEGER = 300  # digits: larger ones are no numbers for most readers of JSON


class Malformed(ValueError):
    """The text of a call is not in the format's syntax."""


@dataclass(frozen=True)
class Piece:
    """A tag of a turn, or the text between two, with its tokens from `start` to before `end`.

    Where a tag is no token of its own, the tokens are those that have a part of the piece; one that has parts of two
    belongs to both.
    """

    text: str
    is_tag: bool
    start: int
    end: int


def split_at_tags(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], tags: Sequence[str]) -> list[Piece]:
    """The pieces of a turn, without those that have no text."""
    tokens = {token: text for token, text in added_tokens(tokenizer).items() if text in tags}
    spelled = "|".join(map(re.escape, sorted(set(tags) - set(tokens.values()), key=len, reverse=True)))
    pieces: list[Piece] = []
    start = 0
    for end, token in enumerate([*ids, None]):
        if token is None or token in tokens:
            pieces += _spelled_pieces(tokenizer, ids, start, end, spelled)
            if token is not None:
                pieces.append(Piece(tokens[token], True, end, end + 1))
            start = end + 1
    return pieces


def _spelled_pieces(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int, spelled: str
) -> Iterable[Piece]:
    """The pieces of the tokens from `start` to before `end`, of which none is a tag, by the tags that are spelled."""
    inner = ids[start:end]
    text = decode_ids(tokenizer, inner)
    parts = re.split(f"({spelled})", text) if spelled else [text]
    counts = character_counts(tokenizer, inner) if len(parts) > 1 else []
    at = 0
    pieces: list[Piece] = []
    for place, part in enumerate(parts):
        if part:
            whole = len(part) == len(text)
            first, last = (0, len(inner)) if whole else tokens_of(counts, at, at + len(part))
            # Bytes that are no character count with the token behind them, which is the next piece's.
            if pieces and pieces[-1].text.endswith(_NO_CHARACTER):
                before = pieces.pop()
                ends = max(start + 1, min(before.end, start + first))
                pieces.append(replace(before, start=min(before.start, ends - 1), end=ends))
            pieces.append(Piece(part, place % 2 == 1, start + first, start + last))
        at += len(part)
    return pieces


def character_counts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """How many characters the first n tokens give, for each n: bytes at the end that are no character yet do not count.

    In time in proportion to the ids, since a policy may repeat a tag to the end of its turn.
    """
    counts = [0]
    # Tokens from `start` on are decoded again, since a token's text may depend on the one before it; those up to `read`
    # end with a character.
    start = read = 0
    for end in range(1, len(ids) + 1):
        before, text = (decode_ids(tokenizer, ids[start:place]) for place in (read, end))
        counts.append(counts[read] + len(text.rstrip(_NO_CHARACTER)) - len(before))
        if not text.endswith(_NO_CHARACTER):
            start, read = read, end
    return counts


def tokens_of(counts: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """The span of the tokens that have a part of the characters from `start` to before `end` of the decoded ids, by
    their `character_counts`."""
    # The last of the fewest tokens that give the character at `start` has a part of it.
    last = len(counts) - 1
    first = bisect_left(counts, start + 1, hi=last)
    return max(first - 1, 0), bisect_left(counts, end, first, last)


def read_json(text: str) -> Any:
    """The value of a JSON text, white space around it allowed.

    Raises `Malformed` for what is no JSON, and for what readers of JSON disagree about: a key that comes twice, NaN,
    numbers that are not finite, halves of surrogate pairs.
    """
    try:
        value = _DECODER.decode(text.strip())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Malformed("half of a surrogate pair is no character") from error
    except RecursionError as error:
        raise Malformed(_TOO_DEEP) from error
    except json.JSONDecodeError as error:
        raise Malformed(f"{error.msg} at character {error.pos}") from error
    # What can be read may still be too deep for those who check it against a schema, store it or send it on.
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return value
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    raise Malformed(_TOO_DEEP)


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise Malformed("a number is too large")
    return int(text)


def _finite(text: str) -> float:
    if isinf(float(text)):
        raise Malformed("a number is too large")
    return float(text)


def _no_number(text: str) -> Any:
    raise Malformed(f"{text} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Malformed(f"the key {name!r:.100} comes twice")
        found[name] = value
    return found


_DECODER = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_int=_integer, parse_float=_finite, parse_constant=_no_number
)


def json_call(text: str, span: tuple[int, int], tools: Sequence[Tool], keys: tuple[str, ...] = ("arguments",)) -> Call:
    """The call of a JSON text: an object with `name`, and its arguments under one of `keys`."""
    try:
        value = read_json(text)
    except Malformed as error:
        return failed(CallStatus.INVALID_JSON, span, str(error))
    if not isinstance(value, dict):
        return failed(CallStatus.INVALID_JSON, span, "a call is a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return failed(CallStatus.MISSING_NAME, span, 'a call needs "name", a text')
    given = [key for key in keys if key in value]
    others = sorted(set(value) - {"name", "type", "id", *keys})
    arguments = value[given[0]] if given else {}
    # A tool that does not exist is told first, whatever is wrong with the arguments.
    call = checked_call(name, arguments if isinstance(arguments, dict) else {}, span, tools)
    if call.status is CallStatus.UNKNOWN_TOOL:
        return call
    if not isinstance(arguments, dict):
        return failed(CallStatus.INVALID_ARGUMENTS, span, f'"{given[0]}" is a JSON object', name)
    if others or len(given) > 1:
        detail = f'a call has "name" and "{keys[0]}", not {", ".join(map(repr, [*others, *given[1:]]))}'
        return failed(CallStatus.INVALID_ARGUMENTS, span, detail, name, arguments)
    return call


def checked_call(name: str, arguments: dict[str, Any], span: tuple[int, int], tools: Sequence[Tool]) -> Call:
    """A call whose text could be read, with what its tool's schema says of it."""
    schemas = tool_schemas(tools)
    if name not in schemas:
        return failed(CallStatus.UNKNOWN_TOOL, span, f"no tool has the name {name!r}", name, arguments)
    # The schema may be that of a tool server: what it cannot resolve by itself is not fetched.
    source = (exceptions.SchemaError, Unresolvable, RecursionError, re.error)
    what = f"the parameters of the tool {name!r} are no JSON schema"
    with translated(source, lambda error: ConfigError(f"{what}: {str(error):.300}; correct the tool")):
        validator = _validator(json.dumps(schemas[name], sort_keys=True))
        try:
            error = exceptions.best_match(validator.iter_errors(arguments))
        except OverflowError:
            return failed(CallStatus.INVALID_ARGUMENTS, span, "a number is too large", name, arguments)
    if error is not None:
        detail = f"{error.json_path}: {error.message}"
        return failed(CallStatus.INVALID_ARGUMENTS, span, detail, name, arguments)
    return Call(name, arguments, CallStatus.OK, span, "")


def failed(
    status: CallStatus, span: tuple[int, int], detail: str, name: str = "", arguments: dict[str, Any] | None = None
) -> Call:
    return Call(name, arguments or {}, status, span, detail[:_LONGEST_DETAIL])


def tool_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The JSON schema of the arguments, by the name of the tool. Raises `ConfigError` for tools in another form."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ConfigError(
                f'a tool is {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, not {tool!r:.200}'
            )
        if name in found:
            raise ConfigError(f"two tools have the name {name!r}; rename one")
        found[name] = function.get("parameters") or {"type": "object"}
    return found


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    parsed = json.loads(schema)
    kind = validator_for(parsed)
    kind.check_schema(parsed)
    return kind(parsed, registry=EMPTY_REGISTRY)


_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>(.*?)</parameter>\s*", re.DOTALL)


def xml_call(text: str, span: tuple[int, int], tools: Sequence[Tool]) -> Call:
    """The call of a text `<function=name><parameter=key>value</parameter></function>`.

    A value is text if the tool's schema says so, else JSON, or if it is none, text. One line break at each end of a
    value belongs to the format.
    """
    function = _FUNCTION.fullmatch(text)
    if not function:
        return failed(CallStatus.INVALID_JSON, span, "a call is <function=name>...</function>")
    name, body = function[1].strip(), function[2]
    if not name:
        return failed(CallStatus.MISSING_NAME, span, "a call needs a name: <function=name>")
    # XML has texts only: the tool's schema says which of them are values of another type.
    parameters = tool_schemas(tools).get(name, {})
    properties = parameters.get("properties")
    resolver = EMPTY_REGISTRY.resolver_with_root(DRAFT202012.create_resource(parameters))
    arguments: dict[str, Any] = {}
    at = 0
    while match := _PARAMETER.match(body, at):
        key, at = match[1].strip(), match.end()
        if key in arguments:
            return failed(CallStatus.INVALID_JSON, span, f"the parameter {key!r:.100} comes twice", name)
        schema = properties.get(key) if isinstance(properties, dict) else None
        arguments[key] = _value(match[2].removeprefix("\n").removesuffix("\n"), _types(schema, resolver))
    # The loop ends at the first thing that is no parameter; only white space may be left.
    if body[at:].strip():
        return failed(CallStatus.INVALID_JSON, span, f"not <parameter=name>value</parameter>: {body[at:]!r:.100}", name)
    return checked_call(name, arguments, span, tools)


def _value(text: str, types: set[str]) -> Any:
    """A value of an XML call, for a parameter whose schema names `types`. Texts are written without quotation marks.

    Where a text is allowed, JSON of a type that is not is a text: `1984` for a text or null.
    """
    if types == {"string"}:
        return text
    try:
        value = read_json(text)
    except Malformed:
        return text
    is_text = isinstance(value, str) or ("string" in types and not types & _JSON_TYPES[type(value)])
    return text if is_text else value


_JSON_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _types(schema: Any, resolver: Any, inside: frozenset[str] = frozenset()) -> set[str]:
    """The JSON types that a schema names: its own, those of its alternatives, those of its values, and those of the
    schema that it refers to. `inside`: the references that led here.
    """
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type", [])
    found = {own} if isinstance(own, str) else {name for name in own if isinstance(name, str)}
    alternatives = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or []]
    if not found and all(isinstance(value, str) for value in schema.get("enum") or [0]):
        found = {"string"}
    found = found.union(*(_types(part, resolver, inside) for part in alternatives))
    reference = schema.get("$ref")
    if not isinstance(reference, str) or reference in inside:
        return found
    try:
        meant = resolver.lookup(reference)
    except Unresolvable:  # the check of the arguments tells it
        return found
    return found | _types(meant.contents, meant.resolver, inside | {reference})
