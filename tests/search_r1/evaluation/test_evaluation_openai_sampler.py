"""The sampler in front of a completions server: what it sends, what it makes of replies, and how it fails."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time

import pytest
from e2e_world import free_port
from evaluation_world import ModelServer, choice

from search_r1.evaluation.openai_sampler import OpenAISampler
from verl.agent.environment import Generation, Sampling
from verl.agent.text import encode_outside, encode_text
from verl.errors import RolloutError

STOP = ("</search>", "</answer>")
GREEDY = Sampling(temperature=0.0, max_tokens=40, stop=STOP)


def generate(server: ModelServer, tokenizer, sampling: Sampling = GREEDY, **options) -> tuple[Generation, bool]:
    async def run() -> tuple[Generation, bool]:
        sampler = OpenAISampler(server.url, "m", tokenizer, **options)
        try:
            return await sampler.generate([5, 6, 7], sampling), sampler.is_exact
        finally:
            await sampler.close()

    return asyncio.run(run())


def test_token_ids_and_log_probs_are_taken_as_they_are(model_server, byte_tokenizer):
    logprobs = {"token_logprobs": [-0.5, -0.25, -1.0]}
    model_server.answer = lambda body: choice("something else", token_ids=[9, 8, 0], logprobs=logprobs)
    found, exact = generate(model_server, byte_tokenizer)
    assert found == Generation((9, 8, 0), (-0.5, -0.25, -1.0), "stop") and exact
    [body] = model_server.requests
    expected = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0.0, "stop": list(STOP)}
    assert expected.items() <= body.items()
    extensions = {"include_stop_str_in_output": True, "return_token_ids": True, "repetition_penalty": 1.0, "top_k": -1}
    assert extensions.items() <= body.items() and "seed" not in body


def test_a_seed_and_a_key_are_sent(model_server, byte_tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    generate(model_server, byte_tokenizer, Sampling(seed=11, top_p=0.5))
    assert model_server.requests[0]["seed"] == 11 and model_server.requests[0]["top_p"] == 0.5
    assert model_server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (choice("<search> a river"), "<search> a river</search>"),
        (choice("<think>x</think><search> a </search>"), "<think>x</think><search> a </search>"),
        (choice("<search> b <answer> a"), "<search> b <answer> a</answer>"),
        (choice("<answer> Sael", matched_stop="</answer>"), "<answer> Sael</answer>"),
        (choice("said plainly", stop_reason="</search>"), "said plainly</search>"),
        (choice("<answer> Sael", matched_stop=151645), "<answer> Sael<|endoftext|>"),
        (choice("<answer> Sael", stop_reason=None), "<answer> Sael<|endoftext|>"),
        (choice("<answer> a </answer> bye"), "<answer> a </answer> bye<|endoftext|>"),
        (choice("no tag at all"), "no tag at all<|endoftext|>"),
        (choice("it ends itself<|endoftext|>"), "it ends itself<|endoftext|>"),
        (choice("<search> cut by len", finish="length"), "<search> cut by len"),
    ],
)
def test_text_alone_is_tokenised_with_the_stop_that_the_server_cut(reply, text, model_server, byte_tokenizer):
    model_server.answer = lambda body: reply
    found, exact = generate(model_server, byte_tokenizer)
    assert found.ids == encode_text(byte_tokenizer, text) and not exact
    assert len(found.log_probs) == len(found.ids) and all(map(math.isnan, found.log_probs))
    assert found.finish_reason == reply[1]["choices"][0]["finish_reason"]


def test_a_special_token_within_a_text_is_text(model_server, byte_tokenizer):
    """The model may have copied it from a page. Where the server returns ids, they say what it is."""
    text = "<answer> the token <|endoftext|><|pad|> ends a text"
    model_server.answer = lambda body: choice(text)
    found, _ = generate(model_server, byte_tokenizer)
    assert found.ids == encode_outside(byte_tokenizer, text + "</answer>")
    assert not set(found.ids) & set(byte_tokenizer.added_tokens_decoder)
    more = copy.deepcopy(byte_tokenizer)
    more.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    found, _ = generate(model_server, more, tags=("<answer>", "</answer>"))
    assert [more.decode([found.ids[0]]), more.decode([found.ids[-1]])] == ["<answer>", "</answer>"]


def test_a_server_of_plain_openai_is_asked_without_the_extensions(model_server, byte_tokenizer):
    def answer(body):
        if "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
        return choice("<answer> a")

    model_server.answer = answer

    async def run() -> None:
        sampler = OpenAISampler(model_server.url + "/v1/", "m", byte_tokenizer)
        await sampler.generate([1], GREEDY)
        await sampler.generate([1], GREEDY)
        await sampler.close()

    asyncio.run(run())
    assert [("no_stop_trim" in body, "top_k" in body) for body in model_server.requests] == [
        (True, True),
        (False, False),
        (False, False),
    ]


def test_passing_trouble_is_retried(model_server, byte_tokenizer):
    replies = [(503, {}), (429, {}), choice("x", token_ids=[3])]
    model_server.answer = lambda body: replies.pop(0)
    assert generate(model_server, byte_tokenizer)[0].ids == (3,) and replies == []


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, {"error": "context too long"}), "refused the request: HTTP 400.*context too long"),
        ((404, {}), "HTTP 404.*--served_model"),
        ((401, {}), "HTTP 401.*OPENAI_API_KEY"),
        ((200, b"<html>"), "no JSON: '<html>'"),
        ((200, b"[" * 100_000), "no JSON: '"),
        ((200, [1]), "no JSON object"),
        ((200, {"choices": []}), "no completion"),
        (choice("x", finish="abort"), "no completion.*abort"),
        (choice("x", token_ids=["many"]), "no completion"),
    ],
)
def test_what_will_not_pass_is_an_error_at_once(reply, message, model_server, byte_tokenizer):
    model_server.answer = lambda body: reply
    with pytest.raises(RolloutError, match=message) as error:
        generate(model_server, byte_tokenizer)
    assert model_server.url in str(error.value) and len(model_server.requests) == 1


def test_a_server_that_is_down_is_named_with_the_remedy(byte_tokenizer):
    url = f"http://127.0.0.1:{free_port()}"

    async def run() -> None:
        sampler = OpenAISampler(url, "m", byte_tokenizer, deadline_s=0.5)
        try:
            await sampler.check()
        finally:
            await sampler.close()

    started = time.monotonic()
    with pytest.raises(RolloutError, match=f"{url}/v1 is not available.*api_server --model DIR"):
        asyncio.run(run())
    assert time.monotonic() - started < 20


def test_a_turn_that_takes_too_long_ends_at_the_deadline(model_server, byte_tokenizer):
    release = threading.Event()

    def answer(body):
        release.wait(20)
        return choice("late")

    model_server.answer = answer
    with pytest.raises(RolloutError, match="not available.*TimeoutError"):
        generate(model_server, byte_tokenizer, deadline_s=0.3)
    release.set()


def test_a_model_that_is_not_served_is_named(model_server, byte_tokenizer):
    async def longest(name: str) -> int | None:
        sampler = OpenAISampler(model_server.url, name, byte_tokenizer)
        try:
            return await sampler.check()
        finally:
            await sampler.close()

    assert asyncio.run(longest("m")) == 700
    with pytest.raises(RolloutError, match="no model 'other'; set --served_model to one of: m"):
        asyncio.run(longest("other"))


def test_no_more_requests_at_once_than_allowed(model_server, byte_tokenizer):
    lock, running, most, company = threading.Lock(), [0], [0], threading.Event()

    def answer(body):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 3:
                company.set()
        company.wait(20)
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return choice("x", token_ids=[3])

    model_server.answer = answer

    async def run() -> None:
        sampler = OpenAISampler(model_server.url, "m", byte_tokenizer, concurrency=3)
        await asyncio.gather(*(sampler.generate([1], GREEDY) for _ in range(12)))
        await sampler.close()

    asyncio.run(run())
    assert most == [3]
