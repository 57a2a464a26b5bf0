"""`python -m search_r1.serve` as a user runs it: vLLM, a real retrieval server, and the openai client.

The policy knows one episode by heart. test_llm_agent_infer.py shows that infer.py gives the same transcript.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from llm_agent_world import OBSERVATIONS, QUESTION, ROOT, TURNS
from serve_relay import Relay
from transformers import AutoTokenizer

from search_r1.llm_agent.templates import load_template
from verl.agent.messages import encode_prompt
from verl.agent.text import encode_text

pytestmark = pytest.mark.timeout(900)  # with the start of the engine
TOKEN = "a-token"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]}
PARTS = [
    ("think", "<think> the river first \u2013 \u6cb3 </think>"),
    ("search", "<search> river Ildra </search>"),
    ("information", OBSERVATIONS[0]),
    ("search", "<search> city Vonmark </search>"),
    ("information", OBSERVATIONS[1]),
    ("answer", "<answer> Sael </answer>"),
]
REASONING = TURNS[0] + OBSERVATIONS[0] + TURNS[1] + OBSERVATIONS[1]


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(policy_folder)


@pytest.fixture(scope="module")
def relay(search_url: str) -> Iterator[Relay]:
    relay = Relay(search_url)
    yield relay
    relay.shutdown()
    relay.server_close()


@pytest.fixture(scope="module")
def base_url(policy_folder: Path, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The program on a free port, for two requests at a time. It has to stop well when it is told to."""
    flags = ["--template", "tinywiki", "--topk", "1", "--dtype", "float32", "--retriever_url", relay.url]
    flags += ["--port", "0", "--max_concurrent", "2", "--served_model_name", "tiny"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "search_r1.serve", "--model", str(policy_folder), *flags],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"SEARCH_R1_AUTH_TOKEN": TOKEN},
        )  # fmt: skip
    try:
        yield address(server, log)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0, log.read_text()[-4000:]
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(6000):
        match = re.search(r"model tiny on (http://\S+)/v1/chat/completions", log.read_text())
        if match:
            return match.group(1)
        assert server.poll() is None, f"the server ended with {server.returncode}:\n{log.read_text()[-4000:]}"
        time.sleep(0.1)
    raise AssertionError(f"the server did not start in ten minutes:\n{log.read_text()[-4000:]}")


@pytest.fixture
def client(base_url: str, relay: Relay) -> Iterator[openai.OpenAI]:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=TOKEN, max_retries=0)
    wait_until(lambda: health(base_url)["running"] == 0)
    relay.reset()
    yield client
    relay.door.set()
    client.close()


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        yield http


def health(base_url: str) -> dict[str, Any]:
    try:
        return dict(httpx.get(f"{base_url}/healthz", timeout=60).json())
    except httpx.ConnectError:  # the address is announced a moment before the server listens
        return {"running": None}


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def join(chunks: list[Any]) -> list[tuple[str, str]]:
    """(kind, text) parts of a stream, neighbours of one kind joined."""
    parts: list[tuple[str, str]] = []
    for part in (chunk.search_r1 for chunk in chunks if hasattr(chunk, "search_r1") and "kind" in chunk.search_r1):
        if parts and parts[-1][0] == part["kind"]:
            parts[-1] = (part["kind"], parts[-1][1] + part["text"])
        else:
            parts.append((part["kind"], part["text"]))
    return parts


def test_the_whole_reply(client: openai.OpenAI, tokenizer: Any) -> None:
    reply = client.chat.completions.create(**ASK)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("Sael", "stop")
    assert choice.message.reasoning_content == REASONING
    report = reply.search_r1
    assert [(part["kind"], part["text"]) for part in report["parts"]] == PARTS
    assert (report["answer"], report["status"], report["turns"]) == ("Sael", "answered", 3)
    found = [(search["query"], search["document_ids"]) for search in report["searches"]]
    assert found == [("river Ildra", ["river"]), ("city Vonmark", ["city"])]
    assert all(0 < search["ms"] < 30_000 for search in report["searches"])
    prompt = len(encode_prompt(tokenizer, load_template("tinywiki").messages(QUESTION)))
    sampled = sum(len(encode_text(tokenizer, turn)) for turn in TURNS)  # the stop string ends the last turn
    assert reply.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
    }  # fmt: skip
    assert report["information_tokens"] == sum(len(encode_text(tokenizer, text)) for text in OBSERVATIONS)


def test_the_stream_is_the_whole_reply_piece_by_piece(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasoning = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(reasoning) == whole.choices[0].message.reasoning_content
    # A slow reader is given several tokens at once, so how many pieces there are depends on the machine.
    assert len(reasoning) > 2 * len(OBSERVATIONS) and not any("\ufffd" in text for text in reasoning)
    assert join(chunks) == PARTS
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == "stop" and usage.usage == whole.usage
    timeless = [{**search, "ms": None} for search in last.search_r1["searches"]]
    assert timeless == [{**search, "ms": None} for search in whole.search_r1["searches"]]
    assert last.search_r1["answer"] == "Sael"


def test_two_at_once_and_no_third(client: openai.OpenAI, http: httpx.Client, relay: Relay) -> None:
    """Both have written their query before either has read a passage: the words come while they are written."""
    relay.door.clear()
    streams = [client.chat.completions.create(**ASK, stream=True) for _ in range(2)]
    begun = [read_until(stream, "</search>") for stream in streams]
    assert [join(chunks) for chunks in begun] == [PARTS[:2], PARTS[:2]]
    third = http.post("/v1/chat/completions", json=ASK)
    assert third.status_code == 503 and third.headers["Retry-After"] == "1"
    assert third.json()["error"]["type"] == "service_unavailable" and "2 requests" in third.json()["error"]["message"]
    relay.door.set()
    assert [join(chunks + list(stream)) for chunks, stream in zip(begun, streams, strict=True)] == [PARTS, PARTS]


def read_until(stream: openai.Stream[Any], text: str) -> list[Any]:
    chunks: list[Any] = []
    while text not in "".join(words for _, words in join(chunks)):
        chunks.append(next(stream))
    return chunks


def test_a_client_that_leaves_ends_its_search(client: openai.OpenAI, base_url: str, relay: Relay) -> None:
    relay.door.clear()
    stream = client.chat.completions.create(**ASK, stream=True)
    wait_until(lambda: "river Ildra" in relay.queries)
    stream.close()
    wait_until(lambda: health(base_url)["running"] == 0)
    relay.door.set()
    time.sleep(0.5)
    assert set(relay.queries) == {"river Ildra"} and health(base_url)["sampling"] == 0


def test_a_client_that_leaves_ends_its_sampling(client: openai.OpenAI, base_url: str, relay: Relay) -> None:
    relay.door.clear()  # the sampling cannot be past the first search before the client leaves
    stream = client.chat.completions.create(**ASK, stream=True)
    read_until(stream, "<think>")
    stream.close()
    wait_until(lambda: health(base_url)["running"] == 0)
    assert health(base_url)["sampling"] == 0 and "city Vonmark" not in relay.queries


def test_a_client_that_does_not_wait_for_the_whole_reply(client: openai.OpenAI, base_url: str, relay: Relay) -> None:
    relay.door.clear()
    leaving = HTTPConnection(base_url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    leaving.request("POST", "/v1/chat/completions", json.dumps(ASK), headers)
    wait_until(lambda: "river Ildra" in relay.queries)
    leaving.close()
    wait_until(lambda: health(base_url)["running"] == 0)
    assert not relay.door.is_set()


def test_a_retriever_that_fails_gives_an_error_and_no_answer(client: openai.OpenAI, relay: Relay) -> None:
    relay.refuses = True
    with pytest.raises(openai.InternalServerError, match="the retriever failed: .*403") as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.status_code == 503 and caught.value.code == "retriever_unavailable"
    assert caught.value.response.headers["Retry-After"] == "1"
    chunks = []
    with pytest.raises(openai.APIError, match="the retriever failed: .*403"):
        for chunk in client.chat.completions.create(**ASK, stream=True):
            chunks.append(chunk)
    assert join(chunks) == PARTS[:2] and not any(chunk.choices[0].delta.content for chunk in chunks)
    relay.reset()
    assert client.chat.completions.create(**ASK).choices[0].message.content == "Sael"


def test_tokens_are_counted_over_all_turns(client: openai.OpenAI, tokenizer: Any, relay: Relay) -> None:
    first = len(encode_text(tokenizer, TURNS[0]))
    for budget, expected in ((first + 3, 1), (first, 1), (10, 0)):
        reply = client.chat.completions.create(**ASK, max_tokens=budget)
        assert reply.usage.completion_tokens == budget and len(reply.search_r1["searches"]) == expected
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("length", "")
        assert (reply.search_r1["status"], reply.search_r1["answer"]) == ("length_limit", None)
        begun = reply.choices[0].message.reasoning_content
        assert begun and REASONING.startswith(begun)
        chunks = list(client.chat.completions.create(**ASK, max_tokens=budget, stream=True))
        assert "".join(text for _, text in join(chunks)) == begun
        assert chunks[-1].choices[0].finish_reason == "length"


def test_a_seed_makes_a_sampled_reply_repeatable(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Which city?"}]

    def ask(seed: int) -> str:
        reply = client.chat.completions.create(
            model="tiny", messages=question, temperature=1.5, top_p=0.99, seed=seed, max_tokens=30
        )
        return str(reply.choices[0].message.reasoning_content)

    assert ask(1) == ask(1) != ask(2)


def test_who_may_ask(base_url: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = httpx.post(f"{base_url}/v1/chat/completions", json=ASK, headers=headers, timeout=60)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{base_url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{base_url}/healthz", timeout=60).json()["status"] == "ok"


def test_models_and_counters(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    assert http.get("/health").json() == {"status": "ok", "running": 0, "sampling": 0}
    client.chat.completions.create(**ASK)
    assert 'search_r1_requests_total{route="/v1/chat/completions",status="200"}' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("request_body", "status", "param", "code"),
    [
        ({**ASK, "model": "gpt"}, 404, "model", "model_not_found"),
        ({**ASK, "messages": [{"role": "user", "content": "why " * 900}]}, 400, "messages", "context_length_exceeded"),
        ({**ASK, "user": "x" * (1 << 20)}, 413, None, None),
    ],
)
def test_bad_requests(http: httpx.Client, request_body: dict[str, Any], status: int, param: str, code: str) -> None:
    reply = http.post("/v1/chat/completions", json=request_body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (status, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code) and error["message"]
    assert http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/chat/completions").status_code == 405
