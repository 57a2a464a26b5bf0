"""Which chat requests and flags are understood, what is said of others, and which part of an episode a word is of."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from search_r1.llm_agent.grammar import Grammar
from search_r1.serve.__main__ import curl_line, main, parse_arguments
from search_r1.serve.parts import Part, TurnSplitter, merged
from search_r1.serve.wire import ApiError, parse_chat

USER = {"role": "user", "content": "Who?"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def test_a_request_with_every_field() -> None:
    request = parse_chat(
        body(
            messages=[{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]}],
            stream=True, stream_options={"include_usage": True}, max_tokens=7, max_completion_tokens=9, temperature=1,
            top_p=0.5, seed=-3, n=1, user="u", tools=None, stop=[], response_format={"type": "text"},
        )
    )  # fmt: skip
    assert request.question == "Who?" and request.includes_usage and request.stream
    assert (request.budget, request.temperature, request.top_p, request.seed) == (9, 1.0, 0.5, -3)
    assert parse_chat(body(max_tokens=7)).budget == 7
    assert parse_chat(body()).budget is None and not parse_chat(body()).includes_usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Who?"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant"}, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{"content": "Hi"}, USER]}, "messages.0.role"),
        ({"messages": ["Hi", USER]}, "messages.0"),
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"tools": [{}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"top_k": 5}, "top_k"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"echo": True}, "echo"),
        ({"length_penalty": 0.9}, "length_penalty"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"nobody_knows": 0}, "nobody_knows"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body(**fields))
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"].startswith(param) and param.split(".")[0] in error["message"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"model": "m", "messages": [{"role": "user", '])
def test_a_body_that_is_no_request(text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(text)
    assert caught.value.status == 400 and caught.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "unread"),
    [
        ([USER], ""),
        ([{"role": "system", "content": "Be brief."}, USER], "1 system message"),
        ([USER, {"role": "assistant", "content": None}, USER], "2 earlier messages"),
        ([USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, USER], "2 earlier messages"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": 7}, USER], "3 earlier"),
        (
            [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": "No."},
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}, {"type": "file"}, 3]},
                USER,
            ],
            "3 earlier messages",
        ),
        (
            [{"role": "developer", "content": "x"}, {"role": "system", "content": "y"}, USER, USER],
            "2 system messages, 1 earlier message",
        ),
    ],
)
def test_the_last_message_is_the_question(messages: list[dict[str, Any]], unread: str) -> None:
    request = parse_chat(body(messages=messages))
    assert request.question == "Who?" and request.before.startswith(unread) and bool(request.before) == bool(unread)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": "Sael"}],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "user", "content": " \n"}],
        [{"role": "user", "content": None}],
    ],
)
def test_a_conversation_that_ends_without_a_question(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ApiError) as caught:
        _ = parse_chat(body(messages=messages)).question
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_what_asks_for_no_more_than_is_given_anyway() -> None:
    harmless = {
        "modalities": ["text"], "top_logprobs": 0, "logprobs": False, "reasoning_effort": "high", "verbosity": "low",
        "frequency_penalty": 0.0, "top_k": -1, "repetition_penalty": 1.0, "stop": "", "tool_choice": "auto",
    }  # fmt: skip
    assert parse_chat(body(**harmless)).question == "Who?"
    for name, value in {"modalities": ["text", "audio"], "top_logprobs": 2, "stop": "x", "top_k": 4}.items():
        with pytest.raises(ApiError, match=name):
            parse_chat(body(**{name: value}))


def test_what_vllm_fills_in_is_accepted() -> None:
    """Clients that were written for it send a request with all its fields at their defaults."""
    request = ChatCompletionRequest(model="m", messages=[USER])
    sent = request.model_dump(mode="json") | {"top_k": 0, "echo": False, "ignore_eos": False, "length_penalty": 1.0}
    assert len(sent) > 60 and parse_chat(json.dumps(sent).encode()).question == "Who?"


def test_every_parameter_of_openai_may_be_null() -> None:
    fields = set(CompletionCreateParamsBase.__annotations__) - {"model", "messages"}
    assert len(fields) > 30 and parse_chat(body(**dict.fromkeys(fields))).budget is None


@pytest.mark.parametrize(("asked", "given"), [(True, True), (False, False), (None, False)])
def test_usage_is_included_if_asked_for(asked: bool | None, given: bool) -> None:
    assert parse_chat(body(stream_options={"include_usage": asked})).includes_usage == given


def test_minus_one_is_no_limit() -> None:
    assert parse_chat(body(max_tokens=-1)).budget is None
    assert parse_chat(body(max_tokens=5, max_completion_tokens=-1)).budget == 5


@pytest.mark.parametrize(
    ("host", "where"),
    [("127.0.0.1", "127.0.0.1:8001"), ("0.0.0.0", "127.0.0.1:8001"), ("::1", "[::1]:8001"), ("::", "[::1]:8001")],
)
def test_the_printed_curl_command_works_as_pasted(host: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "runs/it's $HOME/actor"
    monkeypatch.setenv("SEARCH_R1_AUTH_TOKEN", "secret")
    line = curl_line(host, 8001, model, with_token=True)
    show = "curl() { printf '%s\\0' \"$@\"; }; "
    words = subprocess.run(["bash", "-c", show + line], capture_output=True, text=True, check=True).stdout.split("\0")
    assert words[0] == f"http://{where}/v1/chat/completions" and "secret" not in line
    assert "Authorization: Bearer secret" in words and "Content-Type: application/json" in words
    assert parse_chat(words[words.index("-d") + 1].encode()).model == model
    assert "Authorization" not in curl_line(host, 8001, model, with_token=False)


GRAMMAR = Grammar()


def split(text: str, pieces: list[str] | None = None, grammar: Grammar = GRAMMAR) -> list[tuple[str, str]]:
    splitter = TurnSplitter(grammar)
    parts = [part for piece in pieces or [text] for part in splitter.feed(piece)]
    answers = grammar.parse_action(text).kind == "answer"
    parts += splitter.end_with_answer() if answers else splitter.end()
    return [(part.kind, part.text) for part in merged(parts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("<think>a</think>b<search>", [("think", "<think>a</think>"), ("text", "b"), ("search", "<search>")]),
        ("so <answer> x </answer>", [("text", "so "), ("answer", "<answer> x </answer>")]),
        # a query or an answer begins inside a thought that nobody closed
        ("<think>a<search>c</search>", [("think", "<think>a"), ("search", "<search>c</search>")]),
        ("<think>a<answer>x</answer>", [("think", "<think>a"), ("answer", "<answer>x</answer>")]),
        # what the grammar reads as one query is one part
        ("<search>a<think>b</search>", [("search", "<search>a<think>b</search>")]),
        # an answer tag without its end makes no answer
        ("<think>no <answer> yet</think>", [("think", "<think>no <answer> yet</think>")]),
        ("<answer>a<search>b</search>", [("text", "<answer>a"), ("search", "<search>b</search>")]),
        ("<answer>never closed", [("text", "<answer>never closed")]),
        ("<search>a<answer>b</search>", [("search", "<search>a<answer>b</search>")]),
        ("a</think>b<thin", [("text", "a</think>b<thin")]),
    ],
)  # fmt: skip
def test_kinds(text: str, expected: list[tuple[str, str]]) -> None:
    assert split(text) == expected


def test_a_grammar_without_search_and_with_other_names() -> None:
    grammar = Grammar(think="plan", search=None)
    text = "<plan>a<search>b</search></plan><answer>x</answer>"
    assert split(text, grammar=grammar) == [
        ("think", "<plan>a<search>b</search></plan>"),
        ("answer", "<answer>x</answer>"),
    ]


def test_words_are_told_at_once_and_tags_when_they_are_certain() -> None:
    splitter = TurnSplitter(GRAMMAR)
    pieces = ["<thi", "nk>the ri", "ver </thi", "s", "</think>", "<answer> x", " </answer>"]
    assert [splitter.feed(piece) for piece in pieces] == [
        [],
        [Part("think", "<think>the ri")],
        [Part("think", "ver ")],
        [Part("think", "</this")],
        [Part("think", "</think>")],
        [],
        [],
    ]
    assert splitter.end_with_answer() == [Part("answer", "<answer> x </answer>")]


fragments = st.sampled_from([*GRAMMAR.tags, "<", "</", "answer>", "a", " \u6cb3", "\n"])


@given(text=st.lists(fragments, max_size=12).map("".join), cuts=st.lists(st.integers(0, 80), max_size=12))
def test_parts_add_up_and_do_not_depend_on_how_the_text_came(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = split(text, [text[i:j] for i, j in zip(places, places[1:], strict=False)])
    assert "".join(text for _, text in parts) == text
    assert parts == split(text, list(text)) == split(text)
    assert ("answer" in dict(parts)) == (GRAMMAR.parse_action(text).kind == "answer")


def test_it_listens_on_this_machine_only_unless_told_otherwise() -> None:
    args = parse_arguments([])
    assert (args.host, args.port, args.auth_token) == ("127.0.0.1", 8001, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_concurrent", "0"], "--max_concurrent is 0"),
        (["--timeout_s", "0"], "--timeout_s is 0"),
        (["--template", "rag"], "template rag"),
        (["--template", "gone"], "no template 'gone'"),
        (["--topk", "0"], "topk"),
        (["--auth_token", "two words"], "SEARCH_R1_AUTH_TOKEN"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
    ],
)
def test_a_flag_that_cannot_be_used(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err
