"""Half a surrogate pair, which JSON may carry and UTF-8 may not, is U+FFFD in any text of a document, by any door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from run_config import run_config
from scripted_policy import Script
from served_app import served_app, served_corpus

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.online import OnlineOptions, load_online
from search_r1.search.retrieval_app import create_app
from verl.agent.environment import Environment, Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.messages import encode_prompt
from verl.agent.text import encode_text
from verl.errors import EnvironmentUnavailable
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_store import load_trajectories, read_trajectories, write_trajectories

HALF = "\ud83d"
FIELDS: dict[str, dict[str, Any]] = {
    "contents": {"contents": f'"T"\nsea {HALF}'},
    "title": {"contents": f'"{HALF}"\nsea'},
    "text": {"text": f"sea {HALF}", "title": "T"},
    "title of a text": {"text": "sea", "title": HALF},
    "id": {"id": f"1{HALF}", "contents": '"T"\nsea'},
    "another text": {"contents": '"T"\nsea', "url": HALF},
    "a list": {"contents": '"T"\nsea', "more": [{"deep": [HALF]}]},
    "a key": {"contents": '"T"\nsea', HALF: 1},
    "the other half": {"contents": '"T"\nsea \udc00'},
}


def _row(fields: dict[str, Any]) -> dict[str, Any]:
    return {"id": "1"} | fields


def _corpus(fields: dict[str, Any], folder: Path) -> Any:
    file = folder / "corpus.jsonl"
    file.write_text(json.dumps(_row(fields)) + "\n")  # ASCII: the halves are escaped
    return served_corpus(file)


def _corpus_of_bytes(fields: dict[str, Any], folder: Path) -> Any:
    """The halves as bytes that are no UTF-8."""
    file = folder / "corpus.jsonl"
    file.write_bytes(json.dumps(_row(fields), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return served_corpus(file)


def _server(fields: dict[str, Any], folder: Path) -> Any:
    """A retrieval server of somebody else's."""
    app = FastAPI()

    @app.post("/")
    async def retrieve(request: Request) -> Response:
        row = _row(fields)
        document = row if "contents" in row else row | {"contents": f"{row['title']}\n{row['text']}"}
        queries = (await request.json())["queries"]
        return Response(json.dumps({"result": [[{"document": document, "score": 1.0}]] * len(queries)}))

    return served_app(app)


def _online(fields: dict[str, Any], folder: Path) -> Any:
    """An online engine behind our server."""
    app = FastAPI()

    @app.post("/")
    async def search(request: Request) -> Response:
        row = _row(fields)
        result = {"title": row.get("title", "T"), "link": f"https://a/{row.get('url', '')}{row['id']}"}
        return Response(json.dumps({"organic": [result | {"snippet": row.get("contents") or row["text"]}]}))

    class Served:
        def __enter__(self) -> str:
            self.engine = served_app(app)
            source = load_online("serper", OnlineOptions(endpoint=self.engine.__enter__(), per_second=1000))
            self.server = served_app(create_app(source))
            return f"{self.server.__enter__()}/retrieve"

        def __exit__(self, *error: object) -> None:
            self.server.__exit__(*error)
            self.engine.__exit__(*error)

    return Served()


DOORS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "corpus": _corpus,
    "bytes of a corpus": _corpus_of_bytes,
    "server": _server,
    "online engine": _online,
}


def _play(tokenizer: Any, environment: Environment, turns: list[str]) -> Trajectory:
    prompt = Prompt(encode_text(tokenizer, "sea?"), "nq", _ROW)
    script = Script([encode_text(tokenizer, turn) for turn in turns])
    limits = EpisodeLimits(max_turns=2, max_response_length=200, max_context_length=2000)
    return asyncio.run(run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))


_ROW = {"question": "sea?", "reward_model": {"ground_truth": {"target": ["sea"]}}}
_TURNS = ["<search> sea </search>", "<answer> sea </answer>"]


def _check(trajectory: Trajectory, tokenizer: Any, folder: Path) -> str:
    """The stored text, after storing and loading it."""
    path = write_trajectories(folder, "train", 1, [trajectory], tokenizer.decode)
    (row,), (loaded,) = read_trajectories(path), load_trajectories(path)
    json.dumps(row, ensure_ascii=False, default=str).encode()
    assert loaded.ids == trajectory.ids and len(loaded.events) == len(trajectory.events)
    return str(row["response_text"])


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("door", DOORS)
def test_a_document_comes_through_a_server(
    byte_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, fields: str
) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "a-key-of-this-test")
    with DOORS[door](FIELDS[fields], tmp_path) as url:
        config = run_config([f"retriever.url={url}", "retriever.timeout_s=5", "retriever.deadline_s=5"])
        trajectory = _play(byte_tokenizer, SearchEnvironment.from_config(config, byte_tokenizer), _TURNS)
    assert trajectory.status is Status.ANSWERED, trajectory.failure
    shown = _check(trajectory, byte_tokenizer, tmp_path)
    assert "sea" in shown and trajectory.events[0]["num_found"] == 1
    if fields in ("contents", "text", "title", "the other half"):
        assert "\ufffd" in shown and "\ufffd" in trajectory.events[0]["observation"]


class _Engine:
    def __init__(self, document: Any) -> None:
        self.document = document

    def search(self, query: str) -> list[Any]:
        if isinstance(self.document, Exception):
            raise self.document
        return [self.document]


@pytest.mark.parametrize("fields", [*FIELDS, "a text alone"])
def test_a_document_comes_from_an_engine_of_ones_own(byte_tokenizer, tmp_path: Path, fields: str) -> None:
    document = _row(FIELDS[fields]) if fields in FIELDS else f"sea {HALF}"
    environment = SearchEnvironment(Searcher(_Engine(document), 3), byte_tokenizer, 500, "No action.")
    trajectory = _play(byte_tokenizer, environment, _TURNS)
    assert trajectory.status is Status.ANSWERED
    assert "sea" in _check(trajectory, byte_tokenizer, tmp_path)


class _Own(Environment):
    """An environment of one's own, whose reply and event have half a character; with `fails`, its error has."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        if self.fails:
            raise EnvironmentUnavailable(f"down {HALF}")
        event = {"query": HALF, "document_ids": [HALF], "result": {HALF: [HALF]}}
        return Outcome("search", valid=True, done=not tools_allowed, reply=f"sea {HALF}", event=event)


@pytest.mark.parametrize("fails", [False, True])
def test_a_reply_and_an_error_of_an_environment_of_ones_own(byte_tokenizer, tmp_path: Path, fails: bool) -> None:
    trajectory = _play(byte_tokenizer, _Own(fails), ["turn"] * 3)
    shown = _check(trajectory, byte_tokenizer, tmp_path)
    if fails:
        assert trajectory.status is Status.FAILED and trajectory.failure == "down \ufffd"
    else:
        assert "sea \ufffd" in shown


def test_an_error_of_an_engine_of_ones_own(byte_tokenizer, tmp_path: Path) -> None:
    searcher = Searcher(_Engine(ValueError(HALF)), 3)
    trajectory = _play(byte_tokenizer, SearchEnvironment(searcher, byte_tokenizer, 500, "No action."), _TURNS)
    assert trajectory.status is Status.FAILED and "\ufffd" in str(trajectory.failure)
    _check(trajectory, byte_tokenizer, tmp_path)


def test_a_question_and_its_answers(byte_tokenizer, tmp_path: Path) -> None:
    """A question on the command line may have bytes that are no characters."""
    ids = encode_prompt(byte_tokenizer, [{"role": "user", "content": f"sea {HALF}?"}])
    assert byte_tokenizer.decode(ids) == "sea \ufffd?"
    row = {"question": f"sea {HALF}?", "reward_model": {"ground_truth": {"target": [HALF]}}}
    segments = [Segment(Source.PROMPT, tuple(ids))]
    _check(Trajectory("g", Prompt(tuple(ids), "nq", row), segments, Status.LENGTH_LIMIT), byte_tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (HALF, "\ufffd"),
        (f"{HALF}a", "\ufffda"),
        (f"a{HALF}{HALF}\udc00", "a\ufffd\U0001f400"),
        ("\ud83d\ude00", "\U0001f600"),  # two halves that belong together
        ("\udc00\ud83d", "\ufffd\ufffd"),
        ("sea \U0001f600 \u6d77 \ufeff", "sea \U0001f600 \u6d77 \ufeff"),
        ("\ufeff" + HALF, "\ufeff\ufffd"),
    ],
)
def test_whole_characters(text: str, whole: str) -> None:
    from search_r1.search.sanitize import whole_characters
    from verl.agent.text import whole_characters as of_verl

    assert whole_characters(text) == of_verl(text) == whole
    assert whole_characters({text: [text, 1, None]}) == {whole: [whole, 1, None]}
