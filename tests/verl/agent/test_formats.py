"""Made-up conversations through every format: what the template writes at once, turn by turn, and read back."""

from __future__ import annotations

import json
from typing import Any
from unicodedata import normalize

import pytest
from format_models import DATE, NAMES, ONE_CALL, THINKING, many, model_format, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from verl.agent.formats import CallStatus
from verl.agent.formats.conversation import read_conversation, write_conversation
from verl.agent.text import added_tokens
from verl.errors import DataError
from verl.protocol import Source

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds passages.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "k": {"type": "integer"}, "only": {"type": "array"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [SEARCH, {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}]

HARMLESS = st.text("ab .,\n\t\"'\\{}[]=:0~\u00e9\u4eac\U0001f600\u00a0/&", min_size=1, max_size=20)
SPOKEN = HARMLESS.map(str.strip).filter(bool)  # of a turn: no white space at its ends
_PARTS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|eot_id|>",
    "<tool_response>", "</tool_response>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>",
    "<|begin_of_text|>", "<", "<|", "<|im_", "im_end|>", "|im_end|>", "tool_call>", "/think>", ">", "~o000000000000~",
    "~b000000000000~", "~c0000000000000", "~", "o000000000000~", "\n", " ", "user\n", '"}}',
    "{{ x }}", "\\", "\x00", "\x1c", "e\u0301",
    "\u2028", "a",
]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=6).map("".join)
BROKEN = st.one_of(HOSTILE, HOSTILE.map(lambda text: text + "\ud83d"))


@st.composite
def conversations(draw: Any, name: str, texts: Any, spoken: Any, arguments: Any = None) -> list[dict[str, Any]]:
    """Ends with a user message or a tool result."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 4))):
        calls = draw(st.integers(0, 1 if name in ONE_CALL else 3))
        # A turn without a call says something; Llama's says nothing beside one.
        said = "" if calls and (name in ONE_CALL or draw(st.booleans())) else draw(spoken)
        turn: dict[str, Any] = {"role": "assistant", "content": said}
        # Qwen3.5's prompt ends in a line break, which the tokenizer joins with that of an empty block of thinking.
        if name in THINKING and (name == "xml" or draw(st.booleans())):
            turn["reasoning_content"] = draw(spoken)
        if calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": "search",
                        "arguments": draw(_arguments(texts) if arguments is None else arguments),
                    },
                }
                for _ in range(calls)
            ]
        messages.append(turn)
        messages += [{"role": "tool", "content": draw(texts)} for _ in range(calls)] or [
            {"role": "user", "content": draw(texts)}
        ]
    return messages


def _arguments(texts: Any) -> Any:
    value = st.one_of(
        texts,
        st.integers(-(10**20), 10**20),
        st.booleans(),
        st.none(),
        st.floats(allow_nan=False, allow_infinity=False),
    )
    return st.fixed_dictionaries(
        {"query": texts},
        optional={"k": st.integers(), "only": st.lists(st.one_of(value, st.dictionaries(texts, value)), max_size=2)},
    )


def at_once(name: str, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """What the template writes by itself."""
    ids = tokenizer_of(name).apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False, **DATE
    )
    return tuple(ids)


def control(name: str, ids: Any) -> list[int]:
    return [token for token in ids if token in added_tokens(tokenizer_of(name))]


def turn_by_turn(form: Any, messages: list[dict[str, Any]]) -> Any:
    """The message that follows, the context before the turn, the turn, and what `bridge` gives for the messages after
    it, for every turn; where that is nothing, the conversation is rendered anew."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return
    context = form.render(messages[: turns[0]], TOOLS).ids
    for place, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn = form.turn(messages[place])
        more = form.bridge((*context, *turn), messages[place + 1 : end])
        yield end, context, turn, more
        context = form.render(messages[:end], TOOLS).ids if more is None else (*context, *turn, *more)


@pytest.mark.parametrize("name", NAMES)
def test_a_rendered_conversation_is_what_the_template_writes(name: str) -> None:
    @many
    @given(conversations(name, HARMLESS, HARMLESS))
    def check(messages: list[dict[str, Any]]) -> None:
        rendered = model_format(name).render(messages, TOOLS)
        assert rendered.ids == at_once(name, messages)
        assert rendered.text == tokenizer_of(name).apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, tokenize=False, **DATE
        )

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_context_grows_into_what_the_template_writes_at_once(name: str) -> None:
    """Where the template drops thinking, and only there, it does not grow."""

    @many
    @given(conversations(name, HARMLESS, SPOKEN))
    def check(messages: list[dict[str, Any]]) -> None:
        form = model_format(name)
        for end, context, turn, more in turn_by_turn(form, messages):
            now = at_once(name, messages[:end])
            if more is not None:
                assert (*context, *turn, *more) == now
            else:
                assert name in THINKING and messages[end - 1]["role"] == "user"
                assert now[: len(context) + len(turn)] != (*context, *turn)

    check()


@pytest.mark.parametrize("thinking", ["all", "tool_cycle"])
@pytest.mark.parametrize("name", THINKING)
def test_thinking_that_is_kept_is_kept_by_render_too(name: str, thinking: str) -> None:
    @many
    @given(conversations(name, HARMLESS, SPOKEN))
    def check(messages: list[dict[str, Any]]) -> None:
        form = model_format(name, thinking)
        for end, context, turn, more in turn_by_turn(form, messages):
            if more is not None:
                assert (*context, *turn, *more) == form.render(messages[:end], TOOLS).ids
            else:
                assert thinking == "tool_cycle" and messages[end - 1]["role"] == "user"

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_is_read_as_it_was_written(name: str) -> None:
    tokenizer = tokenizer_of(name)
    spelled_tags = name == "default-system"  # there, the first closing tag ends a call

    def readable(text: str) -> bool:
        return not ("</parameter>" in text or (spelled_tags and "tool_call>" in text))

    texts = HOSTILE.filter(readable)
    arguments = (
        _arguments(texts) if name != "xml" else st.fixed_dictionaries({"query": texts}, optional={"k": st.integers()})
    )
    # what a turn says may look like a call to a format without tags, or end its thinking
    spoken = SPOKEN if name in (*ONE_CALL, "default-system") else HOSTILE.map(str.strip).filter(bool)
    spoken = spoken.filter(lambda text: name not in ONE_CALL or "{" not in text)

    @many
    @given(conversations(name, HARMLESS, spoken, arguments))
    def check(messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["role"] != "assistant":
                continue
            ids = model_format(name).turn(message)
            read = model_format(name).parse(ids, TOOLS)
            expected = [_normal(tokenizer, call["function"]["arguments"]) for call in message.get("tool_calls", [])]
            assert [call.arguments for call in read.calls] == expected
            assert {call.status for call in read.calls} <= {CallStatus.OK}
            assert read.content == _folded(tokenizer, message["content"]).strip()
            assert read.reasoning == _folded(tokenizer, message.get("reasoning_content", "")).strip()
            end = 0
            for call in read.calls:
                assert end <= call.span[0] < call.span[1] < len(ids)
                end = call.span[1]
                text = tokenizer.decode(ids[slice(*call.span)]).strip()
                begin, close = ("{", "}") if name in ONE_CALL else ("<tool_call>", "</tool_call>")
                assert text.startswith(begin) or spelled_tags and begin in text
                assert text.endswith(close)
                assert text.count('"query"') + text.count("<parameter=query>") >= 1

    check()


def _folded(tokenizer: Any, text: str) -> str:
    """Qwen's tokenizers normalize."""
    return normalize("NFC", text) if tokenizer.backend_tokenizer.normalizer else text


def _normal(tokenizer: Any, arguments: Any) -> Any:
    return json.loads(_folded(tokenizer, json.dumps(arguments, ensure_ascii=False)))


@pytest.mark.parametrize("thinking", ["template", "tool_cycle", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_the_sequences_of_a_rollout(name: str, thinking: str) -> None:
    if thinking != "template" and name not in THINKING:
        pytest.skip("its template has no thinking")

    @many
    @given(conversations(name, HARMLESS, SPOKEN.filter(lambda text: "{" not in text)))
    def check(messages: list[dict[str, Any]]) -> None:
        form = model_format(name, thinking)
        expected: list[list[tuple[str, Any]]] = []
        more = None
        for _, context, turn, following in turn_by_turn(form, messages):
            if more is None:
                expected.append([("context" if expected else "prompt", context)])
            else:
                expected[-1].append(("environment", more))
            expected[-1].append(("policy", turn))
            more = following
        written = write_conversation(form, messages, TOOLS)
        assert [[(part.source, part.ids) for part in sequence] for sequence in written] == expected
        turns = [part for sequence in written for part in sequence if part.source is Source.POLICY]
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        assert [part.message for part in turns] == places
        # and back, but for white space around texts, and ids of calls, which are new
        given = [messages[start:end] for start, end in zip([0, *(p + 1 for p in places)], [*places, None], strict=True)]
        read = read_conversation(form, given, [part.ids for part in turns], TOOLS)
        tokenizer = tokenizer_of(name)
        for ours, theirs in zip(read, messages, strict=True):
            assert ours["role"] == theirs["role"] and ("tool_call_id" in ours) == (ours["role"] == "tool")
            if ours["role"] != "assistant":
                assert ours["content"] == theirs["content"]
                continue
            assert ours["content"] == _folded(tokenizer, theirs["content"]).strip()
            assert ours.get("reasoning_content", "") == _folded(tokenizer, theirs.get("reasoning_content", "")).strip()
            calls = [call["function"] for call in theirs.get("tool_calls", [])]
            arguments = [_xml_free(name, _normal(tokenizer, call["arguments"])) for call in calls]
            assert [_xml_free(name, call["function"]["arguments"]) for call in ours.get("tool_calls", [])] == arguments
        assert len({call["id"] for ours in read for call in ours.get("tool_calls", [])}) == sum(
            message["role"] == "tool" for message in messages
        )

    check()


def _xml_free(name: str, arguments: dict[str, Any]) -> Any:
    """What XML keeps of arguments in any case: it writes texts and numbers alike."""
    return sorted(arguments) if name == "xml" else arguments


@pytest.mark.parametrize("name", NAMES)
def test_no_text_acts(name: str) -> None:
    """The control tokens are those of the same conversation with `x` for every text."""
    tokenizer = tokenizer_of(name)

    @many
    @given(conversations(name, BROKEN, BROKEN), BROKEN)
    def check(messages: list[dict[str, Any]], told: str) -> None:
        form = model_format(name)
        tools = [_with_texts(SEARCH, lambda text: told if text == "Finds passages." else text)]
        tools[0]["function"]["parameters"]["properties"][told] = {"type": "string", "enum": [told, "a"]}
        plain = [
            {**_with_texts(message, lambda text: "x" if text.strip() else text), "role": message["role"]}
            for message in messages
        ]
        for message, other in zip(messages, plain, strict=True):
            for call, counterpart in zip(message.get("tool_calls", []), other.get("tool_calls", []), strict=True):
                counterpart |= {"type": "function"}
                counterpart["function"] = {"name": "search", "arguments": {"query": "x"}}
                assert call["function"]["name"] == "search"
        rendered = form.render(messages, tools)
        assert control(name, rendered.ids) == control(name, form.render(plain, [SEARCH]).ids)
        assert tokenizer.decode(rendered.ids) == _folded(tokenizer, rendered.text)
        for ours, theirs in zip(turn_by_turn(form, messages), turn_by_turn(form, plain), strict=True):
            assert control(name, ours[2]) == control(name, theirs[2])
            assert (ours[3] is None) == (theirs[3] is None)
            assert control(name, ours[3] or ()) == control(name, theirs[3] or ())

    check()


def _with_texts(value: Any, new: Any) -> Any:
    if isinstance(value, str):
        return new(value)
    if isinstance(value, dict):
        return {key: _with_texts(part, new) for key, part in value.items()}
    return [_with_texts(part, new) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_any_ids_can_be_read(name: str) -> None:
    tokenizer = tokenizer_of(name)
    pieces = [*_PARTS, '{"name": "search", "arguments": {"query": "x"}}', '{"name": ', "search", '"parameters": {', "}",
              "<function=search>", "<parameter=k>", "1", "</parameter>", "</function>", "[" * 3000]  # fmt: skip
    tokens = st.one_of(st.integers(0, len(tokenizer) + 50).map(lambda token: [token]), st.sampled_from(pieces).map(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]))  # fmt: skip

    @many
    @given(st.lists(tokens, max_size=12).map(lambda lists: tuple(token for ids in lists for token in ids)))
    def check(ids: tuple[int, ...]) -> None:
        read = model_format(name).parse(ids, TOOLS)
        end = 0
        for call in read.calls:
            assert end <= call.span[0] < call.span[1] <= len(ids)
            assert bool(call.detail) == (call.status is not CallStatus.OK)
            end = call.span[1]

    check()


def test_a_turn_that_was_cut_off_or_ended_otherwise_is_continued() -> None:
    form, tokenizer = model_format("trimming"), tokenizer_of("trimming")
    context = form.render([{"role": "user", "content": "a"}]).ids
    end, other = form.stop_token_ids
    cut = tuple(tokenizer("It is", add_special_tokens=False)["input_ids"])
    more = form.bridge((*context, *cut), [{"role": "user", "content": "b"}])
    assert more and tokenizer.decode(more) == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert form.bridge((*context, *cut, end), [{"role": "user", "content": "b"}]) == more[1:]
    assert form.bridge((*context, *cut, other), [{"role": "user", "content": "b"}]) == more[1:]


@pytest.mark.parametrize(
    "messages", [[], [{"role": "assistant", "content": "a"}], [{"role": "system", "content": "a"}]]
)
def test_a_context_goes_on_with_messages_of_others_only(messages: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match="user messages and tool results"):
        model_format("trimming").bridge((1, 2), messages)


def test_a_text_that_guesses_the_marks_costs_no_more_than_another() -> None:
    """A long run of one character, such as marks are often made of, beside thousands of tags."""
    told = "0" * 200_000 + " <tool_call>" * 5000
    rendered = model_format("trimming").render([{"role": "user", "content": told}])
    assert told in rendered.text and len(rendered.text) < len(told) + 100
    plain = model_format("trimming").render([{"role": "user", "content": "x"}])
    assert control("trimming", rendered.ids) == control("trimming", plain.ids)
