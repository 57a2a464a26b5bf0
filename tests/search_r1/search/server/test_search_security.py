"""Every server: this machine only by default, the token on each route but the probes, a bound on each body."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from search_cross_encoders import save_cross_encoder

import search_r1.serve.__main__ as chat_server
from search_r1.http import process
from search_r1.http.gate import Metrics
from search_r1.search import (
    google_search_server,
    rerank_server,
    retrieval_rerank_server,
    retrieval_server,
    serp_search_server,
)
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.online import OnlineOptions, load_online
from search_r1.search.rerank.cross_encoder import CrossEncoder, CrossEncoderOptions
from search_r1.search.rerank.reranker import RerankedSource, Reranker
from search_r1.search.rerank.routes import rerank_router, reranked_router
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.app import AppOptions, create_app_of
from search_r1.search.server.retrieval_service import RetrievalService
from search_r1.search.server.wire import MAX_BODY_BYTES

_TOKEN = "s3cret-t0ken"
_BEARER = {"Authorization": f"Bearer {_TOKEN}"}
_OPTIONS = AppOptions(auth_token=_TOKEN, mcp=True)

Parse = Callable[[Sequence[str]], argparse.Namespace]
PARSERS: dict[str, tuple[Parse, list[str]]] = {
    "retrieval": (retrieval_server.parse_arguments, []),
    "rerank": (rerank_server.parse_arguments, []),
    "retrieval_rerank": (retrieval_rerank_server.parse_arguments, []),
    "serve": (chat_server.parse_arguments, []),
}
PROGRAMS = {  # those that hand the rest of their arguments to the retrieval server
    "google": (google_search_server.main, ["--cse_id", "x", "--snippet_only"]),
    "serp": (serp_search_server.main, ["--search_url", "http://127.0.0.1:1"]),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_server_listens_on_this_machine_only_unless_told_otherwise(name: str) -> None:
    parse, needed = PARSERS[name]
    assert parse(needed).host == "127.0.0.1" and parse(needed).auth_token is None
    assert parse([*needed, "--host", "10.0.0.1"]).host == "10.0.0.1"


@pytest.mark.parametrize("name", PROGRAMS)
def test_so_do_the_published_programs_over_online_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_address(host: str, port: int) -> None:
        asked.append(host)
        raise SystemExit(0)

    monkeypatch.setattr(process, "bind", no_address)
    main, needed = PROGRAMS[name]
    with pytest.raises(SystemExit):
        main(needed)
    assert asked == ["127.0.0.1"]


def test_the_retrieval_script_and_the_benchmarks_listen_here_too() -> None:
    root = Path(__file__).resolve().parents[4]
    assert "HOST=${HOST:-127.0.0.1}\n" in (root / "retrieval_launch.sh").read_text()
    patterns = ("*.sh", "scripts/**/*", "configs/*", "example/**/*.sh")
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        if path.suffix in (".sh", ".py", ".yaml"):
            assert "0.0.0.0" not in path.read_text(), path


def retrieval_app(corpus_file: Path, _: Path) -> FastAPI:
    return create_app(_retrieval(corpus_file), _OPTIONS)


def online_app(_: Path, __: Path) -> FastAPI:
    return create_app(load_online("serper", OnlineOptions(endpoint="http://127.0.0.1:1")), _OPTIONS)


def rerank_app(_: Path, folder: Path) -> FastAPI:
    reranker = _reranker(folder)
    return create_app_of(reranker, rerank_router(reranker, _OPTIONS), _OPTIONS, Metrics())


def retrieval_rerank_app(corpus_file: Path, folder: Path) -> FastAPI:
    reranker = _reranker(folder)
    source = RerankedSource(_retrieval(corpus_file), reranker, 3)
    return create_app_of(source, reranked_router(source, reranker, _OPTIONS), _OPTIONS, Metrics())


def _retrieval(corpus_file: Path) -> RetrievalService:
    corpus = Corpus(corpus_file)
    return RetrievalService(Bm25Retriever.build(corpus), corpus)


def _reranker(folder: Path) -> Reranker:
    return Reranker(CrossEncoder(CrossEncoderOptions(str(save_cross_encoder(folder / "cross")), max_length=64)))


APPS = {
    "retrieval": (retrieval_app, ["/retrieve", "/search", "/batch_search", "/mcp"]),
    "online": (online_app, ["/retrieve", "/mcp"]),
    "rerank": (rerank_app, ["/rerank"]),
    "retrieval_rerank": (retrieval_rerank_app, ["/retrieve", "/rerank"]),
}


@pytest.mark.parametrize("name", APPS)
def test_token_and_body_limit_of_each_route(
    name: str, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the chat endpoint are in test_serve_engine.py, which has a model to serve."""
    monkeypatch.setenv("SERPER_API_KEY", "k3y-AbCdEf-123")
    make, posts = APPS[name]

    async def ask() -> None:
        app = make(corpus_file, tmp_path)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
        async with app.router.lifespan_context(app), client as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                await _refused(http, posts, headers)
            assert (await http.get("/metrics", headers=_BEARER)).status_code == 200
            for path in posts:
                assert (await http.post(path, content=b"{}", headers=_BEARER)).status_code not in (401, 404, 405), path
                too_large = await http.post(path, content=_bytes(MAX_BODY_BYTES + 1), headers=_BEARER)
                assert too_large.status_code == 413, path

    asyncio.run(ask())


async def _refused(http: httpx.AsyncClient, posts: list[str], headers: dict[str, str]) -> None:
    for path in posts:
        refused = await http.post(path, content=b"{}", headers=headers)
        assert refused.status_code == 401 and _TOKEN not in refused.text, path
    for path in ("/metrics", "/health", "/docs", "/openapi.json", "/made/up"):
        assert (await http.get(path, headers=headers)).status_code == 401, path
    for path in ("/healthz", "/readyz"):
        assert (await http.get(path, headers=headers)).status_code != 401, path


async def _bytes(count: int) -> AsyncIterator[bytes]:
    """In chunks, so that there is no Content-Length to trust."""
    for start in range(0, count, 1 << 20):
        yield b"x" * min(1 << 20, count - start)
