"""Which chat requests are understood, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
        (
            [{"role": "developer", "content": "x"}, {"role": "system", "content": "y"}, USER, USER],
            "2 system messages, 1 earlier message",
        ),
    ],
)
def test_the_last_message_is_the_question(messages: list[dict[str, Any]], unread: str) -> None:
    request = parse_chat(body(messages=messages))
    assert (request.question, request.unread) == ("Who?", unread)


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
