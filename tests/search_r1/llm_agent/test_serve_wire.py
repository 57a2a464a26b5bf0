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
    "messages",
    [
        [{"role": "system", "content": "Be brief."}, USER],
        [USER, {"role": "assistant", "content": "Sael"}, USER],
        [{"role": "assistant", "content": "Sael"}],
        [{"role": "user", "content": " \n"}],
    ],
)
def test_a_conversation_is_refused(messages: list[dict[str, str]]) -> None:
    """None of it is dropped in silence: the policy knows one prompt with one question."""
    with pytest.raises(ApiError) as caught:
        _ = parse_chat(body(messages=messages)).question
    assert caught.value.status == 400 and caught.value.param == "messages"
