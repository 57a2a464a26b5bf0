"""Online engines behind servers: command line, statuses, record and replay, the published programs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e_world import free_port
from fastapi import Response
from search_clients import with_client
from search_engines import Engine

from search_r1.errors import RetrieverRejected
from search_r1.http.gate import Metrics
from search_r1.search import google_search_server, retrieval_server, serp_search_server
from search_r1.search.client import RetrievalClient
from search_r1.search.online import PROVIDERS
from search_r1.search.online_arguments import ENGINES

_ROOT = Path(__file__).resolve().parents[4]
KEY = "k3y-AbCdEf-123"


def _post(server: str, *queries: str, **more: Any) -> requests.Response:
    body = {"queries": list(queries), "return_scores": True} | more
    return requests.post(f"{server}/retrieve", json=body, timeout=120)


def _hit(engine: str, host: str, query: str, score: float) -> dict[str, Any]:
    url = f"https://{host}/{query}"
    contents = f'"{query}"\nAbout {query}.'
    return {"document": {"id": url, "url": url, "contents": contents, "title": query, "source": engine}, "score": score}


def test_the_names_are_those_of_the_engines() -> None:
    assert tuple(PROVIDERS) == ENGINES


def test_an_engine_is_served_and_its_failures_have_their_status(run_app, serve, tmp_path: Path) -> None:
    engine = Engine("serper")
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    deny = tmp_path / "deny.txt"
    deny.write_text("denied.org\n")
    server = serve(
        *("--retriever_name", "serper", "--online_endpoint", f"{run_app(engine.app)}/engine", "--topk", "2"),
        *("--online_key_file", str(key_file), "--online_deny_file", str(deny)),
        *("--online_field", "gl=us", "--online_field", "page:=2", "--online_cache_mode", "off"),
    )
    health = requests.get(f"{server}/healthz", timeout=120).json()
    version = health.pop("index_version")
    assert health == {"status": "ok", "retriever": "serper", "corpus_size": None, "topk": 2} and len(version) == 16
    lune = [_hit("serper", "a.org", "lune", 1.0), _hit("serper", "b.org", "lune", 1 / 3)]
    assert _post(server, "lune", topk=1, return_scores=False).json() == {"result": [[lune[0]["document"]]]}
    assert _post(server, "lune", "nothing", "").json() == {"result": [lune, [], []]}
    assert engine.requests[0][0].headers["X-API-KEY"] == KEY
    assert engine.fields[0] == {"q": "lune", "num": 10, "gl": "us", "page": 2}

    for trouble, detail in ((Response("bad key", 401), "HTTP 401: bad key"), (Response("<html>"), "not with search")):
        engine.script = [trouble]
        refused = _post(server, "lune")
        assert refused.status_code == 424 and detail in refused.json()["detail"]
    refused, found = with_client(f"{server}/retrieve", _both_at_once, topk=1)
    assert isinstance(refused, RetrieverRejected) and refused.status == 424
    assert found[0]["url"] == "https://a.org/morn"
    asked = len(engine.asked)
    engine.script = [Response("used up", 429, headers={"Retry-After": "3600"})]
    unavailable = _post(server, "lune")
    assert unavailable.status_code == 503 and unavailable.headers["Retry-After"] == "1"
    assert "HTTP 429: used up" in unavailable.json()["detail"] and len(engine.asked) == asked + 1
    metrics = requests.get(f"{server}/metrics", timeout=120).text
    assert 'retrieval_requests_total{route="/retrieve",status="424"} 2.0' in metrics
    assert "retrieval_errors_total 3.0" in metrics
    assert "retrieval_failed_queries_total 1.0" in metrics


async def _both_at_once(client: RetrievalClient) -> list[Any]:
    """What a query that the engine refuses and another one give: they travel together."""
    return await asyncio.gather(client.search("refused"), client.search("morn"), return_exceptions=True)


def test_what_was_recorded_is_replayed_without_network_and_key(run_app, serve, tmp_path: Path) -> None:
    engine = Engine("tavily")
    cache = ("--retriever_name", "tavily", "--online_cache", str(tmp_path / "new" / "tavily.sqlite"))
    recording = serve(*cache, "--online_endpoint", f"{run_app(engine.app)}/engine", TAVILY_API_KEY=KEY)
    found = _post(recording, "lune").json()
    assert [hit["score"] for hit in found["result"][0]] == [0.5, 0.5, 0.5]
    assert _post(recording, "lune").json() == found and engine.asked == ["lune"]
    nowhere = f"http://127.0.0.1:{free_port()}"
    replaying = serve(*cache, "--online_cache_mode", "replay", "--online_endpoint", nowhere, TAVILY_API_KEY="")
    assert _post(replaying, "lune").json() == found
    miss = _post(replaying, "lune", "morn")
    assert miss.status_code == 424 and "has no answer from tavily" in miss.json()["detail"]
    assert engine.asked == ["lune"]


@pytest.mark.parametrize(
    ("engine", "module", "arguments", "fields"),
    [
        (
            "serpapi",
            "serp_search_server",
            ["--search_url", "ENDPOINT", "--serp_engine", "bing", "--serp_api_key", KEY],
            {"engine": "bing", "q": "lune", "num": "10", "api_key": KEY},
        ),
        (
            "google",
            "google_search_server",
            ["--online_endpoint", "ENDPOINT", "--cse_id", "engine-1", "--snippet_only", "--api_key", KEY],
            {"cx": "engine-1", "q": "lune", "num": "10", "key": KEY},
        ),
    ],
)
def test_the_published_programs(
    run_app, serve, engine: str, module: str, arguments: list[str], fields: dict[str, str]
) -> None:
    made = Engine(engine)
    endpoint = f"{run_app(made.app)}/engine"
    server = serve("--topk", "1", *(endpoint if word == "ENDPOINT" else word for word in arguments), module=module)
    assert _post(server, "lune").json() == {"result": [[_hit(engine, "a.org", "lune", 1.0)]]}
    assert made.fields[0] == fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no API key: set SERPER_API_KEY in the environment, or name a file"),
        (("--online_key_file", "/nowhere"), "cannot read the API key file /nowhere"),
        (("--online_cache_mode", "replay"), "--online_cache_mode replay needs --online_cache"),
        (("--online_cache_mode", "replay", "--online_cache", "/nowhere"), "response cache /nowhere does not exist"),
        (("--online_field", "gl"), "--online_field 'gl' is not NAME=VALUE or NAME:=JSON"),
        (("--online_field", "page:=two"), "--online_field page: 'two' is not JSON"),
        (("--online_per_second", "0"), "per_second is 0.0; it must be more than 0"),
        (("--online_endpoint", "localhost"), "the endpoint 'localhost' is not an http:// or https:// URL"),
    ],
)
def test_what_an_engine_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    assert retrieval_server.main(["--retriever_name", "serper", "--port", "0", *arguments]) == 2
    log = capsys.readouterr().err
    assert message in log and log.startswith("error: ") and log.count("\n") == 1


def test_the_cache_mode_off_leaves_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    for mode, is_there in (("off", False), ("record", True)):
        arguments = ["--retriever_name", "serper", "--online_cache", str(tmp_path / "c"), "--online_cache_mode", mode]
        retrieval_server.load_source(retrieval_server.parse_arguments(arguments), Metrics())
        assert (tmp_path / "c").exists() == is_there


def test_a_local_retriever_says_that_it_needs_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert retrieval_server.main(["--retriever_name", "bm25", "--port", "0"]) == 2
    log = capsys.readouterr().err
    assert log.startswith("error: --retriever_name bm25 needs --corpus_path, a .jsonl file of passages; without one")
    assert "the online engines serper, serpapi, google, brave, tavily" in log and log.count("\n") == 1


def test_an_engine_is_known_in_capitals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    asked = retrieval_server.parse_arguments(["--retriever_name", "Serper"])
    assert retrieval_server.load_source(asked, Metrics()).name == "serper"


def test_the_published_programs_say_what_they_need_and_what_they_do_not_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "")  # --api_key sets it: what it was is restored
    monkeypatch.delenv("GOOGLE_API_KEY")
    snippets = "warning: pages are not fetched; the snippets are served, as with --snippet_only"
    assert google_search_server.main(["--port", "0", "--cse_id", "engine-1"]) == 2
    log = capsys.readouterr().err
    assert log.splitlines()[0] == snippets and "set GOOGLE_API_KEY in the environment" in log
    arguments = ["--port", "0", "--cse_id", "x", "--snippet_only", "--api_key", KEY, "--online_field", "gl"]
    assert google_search_server.main(arguments) == 2
    log = capsys.readouterr().err
    assert log.splitlines()[0].startswith("warning: --api_key shows the key") and "pages" not in log
    assert KEY not in log
    with pytest.raises(SystemExit):
        serp_search_server.main(["--port", "0", "--search_url", "x", "--num_results", "3"])
    assert "unrecognized arguments: --num_results" in capsys.readouterr().err
