"""Conversations as rows of the warm start: ids of a rollout, a mask of the trained turns, files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_models import DATE, NAMES, ONE_CALL, THINKING, TRIMMING, made, model_format, tokenizer_of

from verl.agent.formats.conversation import read_conversation, read_turn, write_conversation
from verl.agent.text import added_tokens
from verl.data.conversations import ConversationRow
from verl.data.sft_rows import TokenisedRow, format_for, read_rows, tokenise_conversation
from verl.errors import ConfigError, DataError
from verl.protocol import Source

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Finds passages.", "parameters": SCHEMA}}]


def called(query: str, identity: str | None = "a", **fields: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "search", "arguments": json.dumps({"query": query})}}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [call | ({"id": identity} if identity else {})],
        **fields,
    }


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def result(text: str, identity: str | None = "a", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": identity} if identity else {}), **fields}


CONVERSATION = [
    {"role": "system", "content": "You search."},
    user("Where is the mill?"),
    called("mill"),
    result("By the river.", name="search"),
    said("By the river."),
    user("And the quern?"),
    called("quern", "b"),
    result("In the barn.", "b"),
    said("In the barn."),
]
TURNS = (2, 4, 6, 8)


def thoughtful(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "reasoning_content": f"Thought {place}."} if message["role"] == "assistant" else message
        for place, message in enumerate(messages)
    ]


def row_file(folder: Path, *rows: Any, kind: str = "jsonl") -> str:
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return str(file)


def read(folder: Path, messages: Any, tools: Any = TOOLS, kind: str = "jsonl", **fields: Any) -> ConversationRow:
    [row] = read_rows(row_file(folder, {"messages": messages, "tools": tools, **fields}, kind=kind))
    assert isinstance(row, ConversationRow)
    return row


def objects(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant message as formats take it: arguments are objects."""
    calls = [
        {"function": {"name": "search", "arguments": json.loads(call["function"]["arguments"])}, "type": "function"}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls}


def trained_runs(row: TokenisedRow) -> list[int]:
    return row.ids_L[row.loss_mask_L].tolist()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("left_out", [(), (4,), (2, 8), (2, 4, 6)])
@pytest.mark.parametrize("name", NAMES)
def test_the_mask_is_that_of_the_chosen_turns(name: str, left_out: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    form = model_format(name)
    messages = thoughtful(CONVERSATION) if name in THINKING else CONVERSATION
    flagged = [{**message, "train": False} if place in left_out else message for place, message in enumerate(messages)]
    rows = tokenise_conversation(form, read(tmp_path, flagged, kind=kind), "policy", 4096)
    chosen = [place for place in TURNS if place not in left_out]
    expected = [token for place in chosen for token in form.turn(objects(messages[place]))]
    assert [token for row in rows for token in trained_runs(row)] == expected
    assert all(row.loss_mask_L[-1] for row in rows)  # nothing after the last turn that is trained


@pytest.mark.parametrize("name", NAMES)
def test_the_ids_are_those_of_a_rollout(name: str, tmp_path: Path) -> None:
    """Qwen3's template drops thinking when a user message comes; there, a second sequence begins."""
    form = model_format(name)
    messages = [objects(message) for message in (thoughtful(CONVERSATION) if name in THINKING else CONVERSATION)]
    sequences, context = [], list(form.render(messages[:2], TOOLS).ids)
    for place, end in zip(TURNS, (4, 6, 8, None), strict=True):
        context += form.turn(messages[place])
        more = form.bridge(context, messages[place + 1 : end]) if end else None
        if more is None:
            sequences.append(context)
            context = list(form.render(messages[:end], TOOLS).ids) if end else []
        else:
            context += more
    given = thoughtful(CONVERSATION) if name in THINKING else CONVERSATION
    rows = tokenise_conversation(form, read(tmp_path, given), "policy", 4096)
    assert [row.ids_L.tolist() for row in rows] == sequences
    assert len(rows) == (2 if name in THINKING else 1)
    if len(rows) == 2:
        assert [row.where for row in rows] == [
            f"{tmp_path / 'rows.jsonl'}: row 0 (line 1), sequence {n}" for n in (0, 1)
        ]
        kept = tokenise_conversation(model_format(name, "all"), read(tmp_path, given), "policy", 4096)
        assert len(kept) == 1 and trained_runs(kept[0]) == trained_runs(rows[0]) + trained_runs(rows[1])


def test_language_modelling_leaves_out_what_is_context(tmp_path: Path) -> None:
    form = model_format("xml")
    flagged = thoughtful(CONVERSATION)
    flagged[2] = {**flagged[2], "train": False}
    first, second = tokenise_conversation(form, read(tmp_path, flagged), "lm", 4096)
    sequences = write_conversation(form, [objects(message) for message in thoughtful(CONVERSATION)], TOOLS)
    for row, sequence, masked in ((first, sequences[0], (1,)), (second, sequences[1], (0,))):
        expected = [place not in masked for place, part in enumerate(sequence) for _ in part.ids]
        expected[0] = False
        assert row.loss_mask_L.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_others_cannot_act(name: str, tmp_path: Path) -> None:
    form, tokenizer = model_format(name), tokenizer_of(name)
    hostile = "".join(added_tokens(tokenizer).values()) + "<tool_response></tool_call>"

    def control(told: str) -> list[list[int]]:
        messages = [
            {"role": "system", "content": told},
            user(told),
            called("mill"),
            result(told),
            said("By the river."),
            user(told),
            said("Yes."),
        ]
        rows = tokenise_conversation(form, read(tmp_path, messages), "policy", 100_000)
        assert "".join(told.split()) in "".join(tokenizer.decode(rows[0].ids_L).split())
        return [[token for token in row.ids_L.tolist() if token in added_tokens(tokenizer)] for row in rows]

    assert control(f"a {hostile} b") == control("a b")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_arguments_and_tools_may_be_texts_or_objects(kind: str, tmp_path: Path) -> None:
    texts = read(tmp_path, CONVERSATION, kind=kind)
    as_objects = [objects(message) if message["role"] == "assistant" else message for message in CONVERSATION]
    for message, given in zip(as_objects, CONVERSATION, strict=True):
        for call, before in zip(message.get("tool_calls") or [], given.get("tool_calls") or [], strict=True):
            call["id"] = before["id"]
    assert read(tmp_path, as_objects, kind=kind) == texts
    assert read(tmp_path, CONVERSATION, json.dumps(TOOLS), kind=kind) == texts
    assert texts.tools == tuple(TOOLS)
    assert texts.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "search", "arguments": {"query": "mill"}}}],
    }
    plain = read(tmp_path, [user("a"), said("b")], None, kind=kind)
    assert plain.needs_tools == "" and plain.trained == {1}


def test_a_null_that_parquet_adds_is_no_argument(tmp_path: Path) -> None:
    """Its structs have a field for each name that any row has."""
    given = [{"query": "mill"}, {"page": 3, "only": [{"year": 1900}, {"place": "x"}]}]
    rows = [
        [user("?"), {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": arguments}}]}]
        for arguments in given
    ]
    file = row_file(tmp_path, *({"messages": messages} for messages in rows), kind="parquet")
    read_back = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in read_rows(file)]
    assert read_back == given


def test_results_stand_in_the_order_of_their_calls(tmp_path: Path) -> None:
    two = called("mill")
    two["tool_calls"] += called("quern", "b")["tool_calls"]
    mixed = read(tmp_path, [user("?"), two, result("2", "b"), result("1", "a"), said("x")])
    assert [message["content"] for message in mixed.messages] == ["?", "", "1", "2", "x"]
    without = called("mill", None)
    without["tool_calls"] += called("quern", None)["tool_calls"]
    in_order = read(tmp_path, [user("?"), without, result("1", None), result("2", None), said("x")])
    assert [message["content"] for message in in_order.messages] == ["?", "", "1", "2", "x"]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_read_back(name: str, tmp_path: Path) -> None:
    form = model_format(name)
    given = thoughtful(CONVERSATION) if name in THINKING else CONVERSATION
    messages = read(tmp_path, given).messages
    sequences = write_conversation(form, messages, TOOLS)
    turns = [part.ids for sequence in sequences for part in sequence if part.source is Source.POLICY]
    others = [messages[:2], messages[3:4], messages[5:6], messages[7:8]]
    expected = [{name: value for name, value in message.items() if value != []} for message in messages]
    assert read_conversation(form, others, turns, TOOLS) == expected
    assert read_conversation(form, others, turns) == expected  # a call of an unknown tool is a call
    with pytest.raises(DataError, match="turn 0: 2 results follow its 1 calls"):
        read_conversation(form, [messages[:2], [*messages[3:4], *messages[3:4]]], turns[:1], TOOLS)
    with pytest.raises(DataError, match="4 turns have messages before each"):
        read_conversation(form, others[:2], turns, TOOLS)


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ('<tool_call>\n{"name": "search", "arguments": {"query": "x"}\n</tool_call>', "invalid_json"),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}', "unclosed"),
        ('<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>', "is a JSON object"),
        ('<tool_call>\n{"name": "other", "arguments": [1]}\n</tool_call>', "is a JSON object"),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "x"}, "k": 1}\n</tool_call>', "not 'k'"),
        ("  \n", "neither a text nor a call"),
    ],
)
def test_a_turn_that_no_message_says_is_refused(turn: str, error: str) -> None:
    tokenizer = tokenizer_of("trimming")
    with pytest.raises(DataError, match=error):
        read_turn(model_format("trimming"), tokenizer(turn, add_special_tokens=False)["input_ids"], TOOLS)
    against = '<tool_call>\n{"name": "search", "arguments": {"k": 1}}\n</tool_call>'
    message = read_turn(model_format("trimming"), tokenizer(against, add_special_tokens=False)["input_ids"], TOOLS)
    assert message["tool_calls"][0]["function"]["arguments"] == {"k": 1}


ASK = user("?")
BAD = {
    "no list": ("a text", None, "messages is 'a text'; it has to be a list"),
    "empty": ([], None, r"messages is \[\]"),
    "unknown role": ([ASK, {"role": "function", "content": "x"}], None, r"messages\[1\]: its role is 'function'"),
    "no message": ([ASK, "hello"], None, r"messages\[1\]: its role is None"),
    "no call before": ([ASK, result("x")], None, r"messages\[1\]: a tool result without a call: no call comes before"),
    "second result": (
        [ASK, called("x"), result("1"), result("2")],
        TOOLS,
        r"messages\[3\]: a tool result without a call: all calls before it have a result",
    ),
    "unknown id": (
        [ASK, called("x"), result("x", "z")],
        TOOLS,
        r"messages\[2\]: tool_call_id is 'z', but the calls without a result are 'a' of 'search'",
    ),
    "other tool": (
        [ASK, called("x"), result("x", name="now")],
        TOOLS,
        r"messages\[2\]: it is a result of 'now', but its call is one of 'search'",
    ),
    "no result": (
        [ASK, called("x"), user("and?")],
        TOOLS,
        r"messages\[2\]: a message of user follows, but 'a' of 'search' has no result; put its result",
    ),
    "says nothing": ([ASK, said(" ", reasoning_content="Hm.")], None, r"messages\[1\]: .*needs content or tool_calls"),
    "no user text": ([user(""), said("x")], None, r"messages\[0\]: a user message needs content"),
    "no result text": (
        [ASK, called("x"), {"role": "tool", "tool_call_id": "a"}],
        TOOLS,
        r"messages\[2\]: .*write \"\"",
    ),
    "content in parts": (
        [user([{"type": "text", "text": "x"}]), said("x")],  # type: ignore[arg-type]
        None,
        r"messages\[0\]: content is .*one text",
    ),
    "late system": ([ASK, {"role": "system", "content": "x"}], None, r"messages\[1\]: a system message comes first"),
    "begins with it": ([said("x"), ASK, said("y")], None, r"messages\[0\]: a conversation begins with"),
    "two in a row": ([ASK, said("x"), said("y")], None, r"messages\[2\]: an assistant message follows another"),
    "no turn": ([ASK, user("!")], None, "has no assistant message to train on"),
    "none trained": ([ASK, said("x", train=False)], None, "all assistant messages have train false"),
    "no bool": ([ASK, said("x", train=0)], None, r"messages\[1\]: train is 0; write true or false"),
    "trained user": (
        [{**ASK, "train": True}, said("x")],
        None,
        r"messages\[0\]: messages of user have no field 'train'",
    ),
    "other field": ([ASK, said("x", weight=0)], None, r"messages\[1\]: messages of assistant have no field 'weight'"),
    "no tools list": ([ASK, said("x")], {"name": "search"}, "tools: it is {'name': 'search'}; it has to be a list"),
    "no tool": ([ASK, said("x")], [{"name": "search"}], "tools: a tool is"),
    "no tools JSON": ([ASK, said("x")], "[{", "tools: it is a text, but no JSON"),
    "no schema": (
        [ASK, said("x")],
        [{"type": "function", "function": {"name": "search", "parameters": {"type": "texts"}}}],
        "tools: the tool 'search': its parameters are no JSON schema",
    ),
    "no call": (
        [ASK, {"role": "assistant", "tool_calls": [{"name": "x"}]}],
        None,
        r"tool_calls\[0\]: it is .*a call is",
    ),
    "same id": (
        [ASK, {**called("x"), "tool_calls": called("x")["tool_calls"] * 2}],
        TOOLS,
        r"messages\[1\], tool_calls\[1\]: two calls have the id 'a'",
    ),
    **{
        f"arguments {arguments}": (
            [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": arguments}}]}],
            TOOLS,
            r"messages\[1\], tool_calls\[0\]: arguments .* are no JSON object",
        )
        for arguments in ("[1]", '{"a": 1', "", None, 3, '{"a": 1, "a": 2}')
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_conversations_are_named(case: str, tmp_path: Path) -> None:
    messages, tools, error = BAD[case]
    file = row_file(tmp_path, {"messages": CONVERSATION, "tools": TOOLS}, {"messages": messages, "tools": tools})
    with pytest.raises(DataError, match=rf"rows.jsonl: row 1 \(line 2\).*{error}"):
        read_rows(file)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"messages": [}', r"row 0 \(line 1\): no JSON"),
        (
            '\n\n{"messages": [{"role": "user", "role": "user"}]}',
            r"row 0 \(line 3\): no JSON: the key 'role' comes twice",
        ),
        ("[1]", "a row is a JSON object"),
        ('{"text": "x"}', "column 'segments' is missing; its columns are text"),
        ('{"segments": [], "messages": []}', "two forms of a row"),
        ('{"segments": 3}', "column 'segments' is empty, or no list"),
        ('{"messages": [], "phase": "sft"}', "column 'phase': 'sft' is neither"),
        ("\n", "no rows in"),
    ],
)
def test_bad_jsonl_is_named(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=error):
        read_rows(str(tmp_path / "rows.jsonl"))


def test_jsonl_may_have_segments(tmp_path: Path) -> None:
    segments = [{"source": "prompt", "text": "a"}, {"source": "policy", "text": "b", "ids": None}]
    [row] = read_rows(row_file(tmp_path, {"segments": segments, "phase": "lm"}))
    assert (row.sources, row.texts, row.ids, row.phase) == (("prompt", "policy"), ("a", "b"), None, "lm")


def test_what_the_template_cannot_write_is_named(tmp_path: Path) -> None:
    two = called("mill")
    two["tool_calls"] += called("quern", "b")["tool_calls"]
    place = r"rows.jsonl: row 0 \(line 1\), messages\[1\]"
    for name in ONE_CALL:
        with pytest.raises(DataError, match=f"{place}: .*cannot write these messages"):
            tokenise_conversation(model_format(name), read(tmp_path, [ASK, two]), "policy", 4096)
        beside = {**called("mill"), "content": "I look it up."}
        with pytest.raises(DataError, match=f"{place}: .*content '', which is not that of the message; take"):
            tokenise_conversation(model_format(name), read(tmp_path, [ASK, beside]), "policy", 4096)
    with pytest.raises(DataError, match=f"{place}: .*leaves out its thinking"):
        thought = said("x", reasoning_content="Hm.")
        tokenise_conversation(model_format("trimming"), read(tmp_path, [ASK, thought]), "policy", 4096)
    with pytest.raises(DataError, match=f"{place}: .*take out what looks like a call"):
        looks = said('{"name": "search", "parameters": {"query": "x"}}')
        tokenise_conversation(model_format("headers"), read(tmp_path, [ASK, looks]), "policy", 4096)
    with pytest.raises(DataError, match=r"row 0 \(line 1\): \d+ tokens are more than data.max_length=9; raise it"):
        tokenise_conversation(model_format("trimming"), read(tmp_path, [ASK, called("x")]), "policy", 9)


def test_a_template_without_tools_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    plain = made(TRIMMING.replace("{{ listed(tools) }}", ""))
    rows: list[Any] = [read(tmp_path, [ASK, said("x")], None)]
    form = format_for(plain, rows)
    assert form is not None
    [row] = tokenise_conversation(form, rows[0], "policy", 4096)
    assert plain.decode(row.ids_L[row.loss_mask_L]) == "x<|im_end|>"
    rows.append(read(tmp_path, [ASK, called("x")], None))
    with pytest.raises(ConfigError, match=r"rows.jsonl: row 0 \(line 1\), messages\[1\]: .*does not write the tools"):
        format_for(plain, rows)
    with pytest.raises(ConfigError, match=r"row 0 \(line 1\), messages: the tokenizer has no chat template"):
        format_for(made(None), rows[:1])
    assert format_for(made(None), []) is None


def test_settings_of_the_template_reach_it(tmp_path: Path) -> None:
    row = read(tmp_path, thoughtful(CONVERSATION))
    form = format_for(tokenizer_of("xml"), [row], "all", {"enable_thinking": True, **DATE})
    assert form is not None and len(tokenise_conversation(form, row, "policy", 4096)) == 1
