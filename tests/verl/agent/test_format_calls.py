"""Turns written by hand, as policies write them: which calls they have, what is wrong with each, and where it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from format_models import model_format, tokenizer_of

from verl.agent.formats import CallStatus, Format
from verl.errors import ConfigError

OK, JSON, UNCLOSED = CallStatus.OK, CallStatus.INVALID_JSON, CallStatus.UNCLOSED
NAME, UNKNOWN, ARGUMENTS = CallStatus.MISSING_NAME, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [
    tool(
        "search",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1},
                "k": {"type": "integer", "maximum": 10},
                "when": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "string"}]},
                "step": {"type": "number", "multipleOf": 0.5},
                "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "year": {"anyOf": [{"$ref": "#/$defs/year"}, {"type": "null"}]},
            },
            "$defs": {"year": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    ),
    tool("now", {"type": "object", "properties": {}}),
]
GOOD = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'


def in_call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def search(arguments: str) -> str:
    return in_call(f'{{"name": "search", "arguments": {arguments}}}')


def parse(name: str, text: str) -> Any:
    ids = tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]
    return model_format(name).parse(ids, TOOLS)


HERMES = [
    # what is well
    ("It is a river.<|im_end|>", [], "It is a river."),
    ("", [], ""),
    ("<|im_end|>", [], ""),
    (GOOD + "<|im_end|>", [OK], ""),
    (GOOD, [OK], ""),
    (f"Let me look.\n{GOOD}\n{GOOD}\nDone.", [OK, OK], "Let me look.\n\n\nDone."),
    (in_call('{"name": "now"}'), [OK], ""),
    (in_call('{"name": "now", "arguments": {}, "id": "call_1", "type": "function"}'), [OK], ""),
    (in_call(' \n{"arguments": {"query": "a"},\n "name": "search"}\n\n'), [OK], ""),
    (search('{"query": "\\u4eac \\ud83d\\ude00", "k": 3}'), [OK], ""),
    ("</tool_call> and then " + GOOD, [OK], "</tool_call> and then"),
    (f"a<|im_end|>{GOOD}", [], "a"),  # nothing is read after the end
    # what is no JSON
    (in_call(""), [JSON], ""),
    (in_call("search: a"), [JSON], ""),
    (in_call("{'name': 'search'}"), [JSON], ""),
    (in_call('{"name": "search", "arguments": {"query": "a"}} I hope'), [JSON], ""),
    (in_call('{"name": "search", "arguments": {"query": "a"}'), [JSON], ""),
    (in_call('[{"name": "now"}]'), [JSON], ""),
    (in_call('"now"'), [JSON], ""),
    (in_call('{"name": "now", "name": "search"}'), [JSON], ""),
    (search('{"query": "a", "k": NaN}'), [JSON], ""),
    (search('{"query": "a", "k": -Infinity}'), [JSON], ""),
    (search('{"query": "a", "k": 1e999}'), [JSON], ""),
    (search('{"query": "a", "k": ' + "9" * 5000 + "}"), [JSON], ""),
    (search('{"query": "\\ud83d"}'), [JSON], ""),
    (search('{"query": ' + "[" * 100_000 + "}"), [JSON], ""),
    (search('{"query": "a\nb"}'), [JSON], ""),  # a line break in a string
    # what has no end
    ('<tool_call>{"name": "search", "argu', [UNCLOSED], ""),
    (GOOD.removesuffix("</tool_call>") + "<|im_end|>", [UNCLOSED], ""),
    ("x<tool_call>", [UNCLOSED], "x"),
    ('<tool_call>{"name": ' + GOOD, [UNCLOSED, OK], ""),
    ("<tool_call>" * 3, [UNCLOSED] * 3, ""),
    # what names no tool
    (in_call('{"arguments": {"query": "a"}}'), [NAME], ""),
    (in_call('{"name": 3, "arguments": {}}'), [NAME], ""),
    (in_call('{"name": ["search"], "arguments": {}}'), [NAME], ""),
    (in_call('{"name": "", "arguments": {}}'), [NAME], ""),
    (in_call("{}"), [NAME], ""),
    (in_call('{"name": "Search", "arguments": {"query": "a"}}'), [UNKNOWN], ""),
    (in_call('{"name": "rm", "arguments": "all"}'), [UNKNOWN], ""),
    # what no tool takes
    (search("{}"), [ARGUMENTS], ""),
    (search('"a"'), [ARGUMENTS], ""),
    (search("null"), [ARGUMENTS], ""),
    (search('{"query": 3}'), [ARGUMENTS], ""),
    (search('{"query": ""}'), [ARGUMENTS], ""),
    (search('{"query": "a", "k": 11}'), [ARGUMENTS], ""),
    (search('{"query": "a", "step": 1e308}'), [OK], ""),
    (search('{"query": "a", "step": 0.3}'), [ARGUMENTS], ""),
    (search('{"query": "a", "color": "red"}'), [ARGUMENTS], ""),
    (in_call('{"name": "search", "query": "a"}'), [ARGUMENTS], ""),
    (in_call('{"name": "now", "parameters": {}}'), [ARGUMENTS], ""),
]


def test_a_call_of_llama_that_is_cut_off_anywhere_is_unclosed() -> None:
    """Also within a number, a literal or an escape; what cannot be completed is no JSON."""
    arguments = {"query": 'a\u4eac\U0001f600"\\', "k": -1.5e-7, "only": [True, False, None, {}]}
    text = json.dumps({"name": "search", "parameters": arguments})
    for end in range(len('{"name":'), len(text)):
        [call] = parse("headers", text[:end]).calls
        assert call.status is CallStatus.UNCLOSED, text[:end]
    for broken in ("tru}", "nil", "b", '"a"e', "-}", '"\\x', '"\\u12g', "1 2"):
        [call] = parse("headers", f'{{"name": "now", "parameters": {{"k": {broken}').calls
        assert call.status is JSON, broken


def test_json_of_more_than_a_hundred_levels_is_none() -> None:
    """It would be too deep for those who check, store and send it: the call and its arguments are two of them."""
    for depth, status in ((98, ARGUMENTS), (99, JSON), (300, JSON), (100_000, JSON)):
        [call] = parse("trimming", search('{"query": ' + "[" * depth + "]" * depth + "}")).calls
        assert call.status is status


@pytest.mark.parametrize("name", ["trimming", "default-system"])
@pytest.mark.parametrize(("text", "statuses", "content"), HERMES)
def test_hermes_calls(name: str, text: str, statuses: list[CallStatus], content: str) -> None:
    """With tags that are tokens, and with tags that are ordinary text."""
    read = parse(name, text)
    assert [call.status for call in read.calls] == statuses, read
    assert (read.content, read.reasoning) == (content, "")
    for call in read.calls:
        assert bool(call.detail) == (call.status is not OK)
        assert len(call.detail) <= 300


THOUGHT = [
    ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    (f"<think>Hm. {GOOD}</think>{GOOD}", f"Hm. {GOOD}", "", [OK]),
    (f"<think>Hm. {GOOD}", f"Hm. {GOOD}", "", []),  # it never stopped thinking
    ("<think></think>Yes.", "", "Yes.", []),
    (f"{GOOD}</think>", "", "</think>", [OK]),
    (f"<think>a</think>b</think>{GOOD}<think>c</think>", "a", "b</think><think>c</think>", [OK]),
    ("<think>a<think>b</think>c", "a<think>b", "c", []),
    (search('{"query": "<think>"}'), "", "", [OK]),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "statuses"), THOUGHT)
def test_thinking(text: str, reasoning: str, content: str, statuses: list[CallStatus]) -> None:
    read = parse("qwen3", text)
    assert (read.reasoning, read.content, [call.status for call in read.calls]) == (reasoning, content, statuses)


def xml(name: str, **parameters: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"</think><tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


XML = [
    (xml("search", query="a", k="3"), OK, {"query": "a", "k": 3}),
    (xml("search", query="3"), OK, {"query": "3"}),
    (xml("search", query="\n two\nlines \n", when="3"), OK, {"query": "\n two\nlines \n", "when": 3}),
    (xml("search", query='<tag> "x" {"a": 1}', when="null"), OK, {"query": '<tag> "x" {"a": 1}', "when": None}),
    (xml("search", query="a", when='"x"'), OK, {"query": "a", "when": '"x"'}),
    (xml("search", query="a", when="soon"), OK, {"query": "a", "when": "soon"}),
    (xml("search", query="a", when="1.5"), OK, {"query": "a", "when": "1.5"}),
    *(
        (xml("search", query="a", title=text), OK, {"query": "a", "title": text})
        for text in ("1984", "true", "[1]", "{}")
    ),
    (xml("search", query="a", title="null"), OK, {"query": "a", "title": None}),
    (xml("search", query="a", year="1984"), OK, {"query": "a", "year": "1984"}),
    (xml("search", query="a", year="null"), OK, {"query": "a", "year": None}),
    (xml("now"), OK, {}),
    (xml("search"), ARGUMENTS, {}),
    (xml("search", query="a", k="three"), ARGUMENTS, {"query": "a", "k": "three"}),
    (xml("search", query="a", k="NaN"), ARGUMENTS, {"query": "a", "k": "NaN"}),
    (xml("find", query="a"), UNKNOWN, {"query": "a"}),
    (xml(""), NAME, {}),
    (xml("search", query="a").replace("</parameter>", ""), JSON, {}),
    (xml("search", query="a").replace("</function>", ""), JSON, {}),
    (xml("search", query="a").replace("</function>", "<parameter=query>b</parameter></function>"), JSON, {}),
    ("</think>" + search('{"query": "a"}'), JSON, {}),
    (xml("search", query="a").replace("</tool_call>", ""), UNCLOSED, {}),
]


@pytest.mark.parametrize(("text", "status", "arguments"), XML)
def test_xml_calls(text: str, status: CallStatus, arguments: dict[str, Any]) -> None:
    [call] = parse("xml", "Hm.\n" + text).calls
    assert (call.status, call.arguments) == (status, arguments), call


def test_a_turn_after_a_prompt_that_begins_the_thinking_is_thinking_until_its_end() -> None:
    read = parse("xml", "Hm. " + xml("now").removeprefix("</think>"))
    assert read.calls == () and read.reasoning.startswith("Hm. <tool_call>")


@pytest.mark.parametrize("name", ["qwen3", "xml"])
def test_a_turn_that_begins_with_the_end_of_its_thinking_has_thought_nothing(name: str) -> None:
    read = parse(name, "</think>\n\nYes.")
    assert (read.reasoning, read.content, read.calls) == ("", "Yes.", ())


LLAMA = [
    ('{"name": "search", "parameters": {"query": "a"}}<|eot_id|>', [OK], ""),
    (' {"name": "search", "arguments": {"query": "a"}}\n', [OK], ""),
    ('{"type": "function", "name": "now", "parameters": {}}', [OK], ""),
    ('Look: <|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>', [OK], "Look:"),
    ('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [JSON], ""),
    ('<|python_tag|>search.call(query="a")<|eom_id|>', [JSON], ""),
    ('{"name": "search", "parameters": {"query": "a', [UNCLOSED], ""),
    ('{"name": "search", "parameters": {"query": "a"}<|eot_id|>', [UNCLOSED], ""),
    ("<|python_tag|>", [UNCLOSED], ""),
    ('{"parameters": {}}', [NAME], ""),
    ('{"name": "rm", "parameters": {}}', [UNKNOWN], ""),
    ('{"name": "search", "parameters": []}', [ARGUMENTS], ""),
    ('{"name": "search", "parameters": {"query": "a"}, "arguments": {"query": "b"}}', [ARGUMENTS], ""),
    ('{"name": "Ildra", "length": 3}', [], '{"name": "Ildra", "length": 3}'),  # an answer
    ("{a set}", [], "{a set}"),
    ('Use {"name": "now", "parameters": {}}.', [], 'Use {"name": "now", "parameters": {}}.'),
]


@pytest.mark.parametrize(("text", "statuses", "content"), LLAMA)
def test_llama_calls(text: str, statuses: list[CallStatus], content: str) -> None:
    read = parse("headers", text)
    assert [call.status for call in read.calls] == statuses, read
    assert read.content == content


@pytest.mark.parametrize("name", ["trimming", "default-system"])
def test_the_span_of_a_call_is_its_tokens(name: str) -> None:
    """Also after characters of several tokens, and bytes that are no characters."""
    tokenizer, form = tokenizer_of(name), model_format(name)
    text = f"\u4eac\u00e9 \ufffd {GOOD}\U0001f600\n{GOOD} b"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    broken = tokenizer("\u4eac", add_special_tokens=False)["input_ids"][:1]
    calls = form.parse([*broken, *ids], TOOLS).calls
    assert [call.arguments for call in calls] == [{"query": "a"}] * 2
    for call in calls:
        assert tokenizer.decode([*broken, *ids][slice(*call.span)]).strip(" \n\ufffd") == GOOD
    before = [*broken, *ids][: calls[0].span[0]]
    assert "tool_call" not in tokenizer.decode(before)


def test_a_call_that_ends_in_half_a_character_ends_before_the_next() -> None:
    tokenizer = tokenizer_of("default-system")
    tag, half = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<tool_call>", "\u4eac"))
    ids = [*tag, half[0], *tag, half[0], *tag]
    calls = model_format("default-system").parse(ids, TOOLS).calls
    size = len(tag) + 1
    assert [call.span for call in calls] == [(0, size), (size, 2 * size), (2 * size, len(ids))]


def test_a_tag_that_is_spelled_again_and_again_is_read_in_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that has collapsed repeats it to the end of its turn, and nothing else runs while that is read."""
    tokenizer, num_decoded = tokenizer_of("default-system"), 0
    decode = type(tokenizer).decode

    def counted(self: Any, ids: Any, **options: Any) -> Any:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(self, ids, **options)

    ids = tokenizer("<tool_call>" * 300, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(type(tokenizer), "decode", counted)
    calls = model_format("default-system").parse(ids, TOOLS).calls
    assert len(calls) == 300 and num_decoded < 10 * len(ids)


def test_a_tag_that_is_spelled_is_text_where_the_tag_is_a_token() -> None:
    tokenizer = tokenizer_of("trimming")
    spelled = [token for part in ("<tool", "_call>{}</tool", "_call>") for token in tokenizer(part)["input_ids"]]
    assert model_format("trimming").parse(spelled, TOOLS).calls == ()


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([{"name": "search"}], "a tool is"),
        ([tool("", {})], "a tool is"),
        ([tool("now", {}), tool("now", {})], "two tools have the name 'now'"),
        ([tool("now", {"type": "thing"})], "no JSON schema"),
        ([tool("now", {"$ref": "http://127.0.0.1:9/schema.json"})], "no JSON schema"),  # it is not fetched
        ([tool("now", {"$ref": "#"})], "no JSON schema"),
        ([tool("now", {"properties": {"a": {"pattern": "("}}})], "no JSON schema"),
    ],
)
def test_tools_that_are_none(tools: list[Any], error: str) -> None:
    form: Format = model_format("trimming")
    ids = tokenizer_of("trimming")(in_call('{"name": "now", "arguments": {"a": "b"}}'))["input_ids"]
    with pytest.raises(ConfigError, match=error):
        form.parse(ids, tools)
