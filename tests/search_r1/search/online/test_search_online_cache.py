"""The response cache: record and replay against a real server, ages, files that are no cache."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from search_r1.errors import OnlineError, ReplayMissError
from search_r1.http.response_cache import ResponseCache, request_key
from search_r1.search.online import OnlineOptions, load_online

KEY = "a-key-of-the-tests"


class Engine:
    """Answers like Tavily, with a text that differs each time; `nothing` finds nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.app = FastAPI()
        self.app.post("/search")(self._answer)

    async def _answer(self, request: Request) -> dict[str, Any]:
        query = (await request.json())["query"]
        self.asked.append(query)
        page = {"title": query, "url": "https://a.org", "content": f"answer {len(self.asked)}", "score": 0.5}
        return {"results": [] if query == "nothing" else [page]}


def _search(queries: list[str], k: int = 3, **options: Any) -> list[list[str]]:
    async def main() -> list[list[str]]:
        source = load_online("tavily", OnlineOptions(per_second=1000.0, **options))
        try:
            found = await source.search(queries, k)
        finally:
            await source.close()
        return [[document["contents"] for document, _ in hits] for hits in found]

    return asyncio.run(main())


@pytest.fixture
def recorded(run_app, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, dict[str, str]]:
    """An engine and the options that record its answers; `lune` and `nothing` have been asked."""
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    engine = Engine()
    options = {"endpoint": f"{run_app(engine.app)}/search", "cache_path": str(tmp_path / "new" / "cache.sqlite")}
    assert _search(["lune", "nothing"], cache_mode="record", concurrency=1, **options) == [['"lune"\nanswer 1'], []]
    return engine, options


def test_a_recorded_answer_is_not_asked_again(recorded) -> None:
    engine, options = recorded
    found = _search(["  lune\n", "nothing", "lune"], 1, cache_mode="record", **options)
    assert found == [['"lune"\nanswer 1'], [], ['"lune"\nanswer 1']]
    assert engine.asked == ["lune", "nothing"]
    assert _search(["lune"], cache_mode="off", endpoint=options["endpoint"]) == [['"lune"\nanswer 3']]
    other = _search(["lune"], cache_mode="record", fields={"search_depth": "advanced"}, **options)
    assert other == [['"lune"\nanswer 4']]


def test_replay_needs_neither_engine_nor_key_and_never_asks(recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = recorded
    monkeypatch.delenv("TAVILY_API_KEY")
    Path(options["cache_path"]).chmod(0o444)
    Path(options["cache_path"]).parent.chmod(0o555)
    assert _search(["lune", "nothing"], cache_mode="replay", **options) == [['"lune"\nanswer 1'], []]
    old = {"cache_path": options["cache_path"], "keep_s": 1e-9, "keep_empty_s": 1e-9}  # and no endpoint
    assert _search(["nothing", "lune"], cache_mode="replay", **old) == [[], ['"lune"\nanswer 1']]
    with pytest.raises(ReplayMissError, match=r"cache.sqlite has no answer from tavily to .*unheard.*record"):
        _search(["lune", "unheard"], cache_mode="replay", **options)
    assert engine.asked == ["lune", "nothing"]
    Path(options["cache_path"]).parent.chmod(0o755)


def test_an_empty_answer_lives_shorter(recorded) -> None:
    engine, options = recorded
    _search(["lune", "nothing"], cache_mode="record", keep_empty_s=1e-9, **options)
    assert engine.asked == ["lune", "nothing", "nothing"]
    _search(["lune", "nothing"], cache_mode="record", keep_s=1e-9, **options)
    assert engine.asked == ["lune", "nothing", "nothing", "lune"]
    # the new answer took the place of the old one
    assert _search(["lune"], cache_mode="replay", cache_path=options["cache_path"]) == [['"lune"\nanswer 4']]


def test_ages_in_seconds(tmp_path: Path) -> None:
    now = [1000.0]
    cache = ResponseCache(str(tmp_path / "c"), 100.0, 10.0, clock=lambda: now[0])
    full, empty, unknown = (request_key("serper", {"q": query}) for query in ("full", "empty", "unknown"))
    cache.put(full, "F", False)
    cache.put(empty, "E", True)
    seen = []
    for now[0] in (1009.0, 1010.0, 1099.0, 1100.0):
        seen.append((cache.get(full), cache.get(empty), cache.get(unknown)))
    assert seen == [("F", "E", None), ("F", None, None), ("F", None, None), (None, None, None)]
    cache.close()


def test_keys() -> None:
    key = request_key("serper", {"q": "a", "num": 10})
    assert key.text == '["serper",{"num":10,"q":"a"}]'
    assert key == request_key("serper", {"num": 10, "q": "a"})
    others = [request_key("tavily", {"q": "a", "num": 10}), request_key("serper", {"q": "b", "num": 10})]
    assert len({key.digest, *(other.digest for other in others)}) == 3


def test_what_is_stored_can_be_read_without_us(recorded) -> None:
    _, options = recorded
    with sqlite3.connect(options["cache_path"]) as file:
        rows = file.execute("SELECT request, body, is_empty FROM answers ORDER BY stored_at").fetchall()
    assert json.loads(rows[0][0]) == ["tavily", {"query": "lune", "max_results": 10, "search_depth": "basic"}]
    assert json.loads(rows[0][1])["results"][0]["content"] == "answer 1"
    assert [row[2] for row in rows] == [0, 1]
    assert KEY.encode() not in Path(options["cache_path"]).read_bytes()


def test_files_that_are_no_cache_are_refused_and_left_alone(tmp_path: Path) -> None:
    text, other, newer = (tmp_path / name for name in ("text", "other", "newer"))
    text.write_bytes(b"no database, but long enough to be looked at as if it were one" * 20)
    for path, statement in ((other, "CREATE TABLE theirs (x)"), (newer, "PRAGMA user_version = 2")):
        with sqlite3.connect(path) as file:
            file.execute(statement)
        file.close()
    before = [path.read_bytes() for path in (text, other, newer)]
    for path in (text, other, newer):
        for replay in (False, True):
            with pytest.raises(OnlineError, match=f"cannot use the response cache {path}"):
                ResponseCache(str(path), 1.0, 1.0, replay=replay)
    assert [path.read_bytes() for path in (text, other, newer)] == before
    with pytest.raises(OnlineError, match="gone does not exist"):
        ResponseCache(str(tmp_path / "gone"), 1.0, 1.0, replay=True)
    with pytest.raises(OnlineError, match="cannot use"):
        ResponseCache(str(text / "below-a-file"), 1.0, 1.0)


WRITER = """
import sys
from search_r1.http.response_cache import ResponseCache, request_key
cache = ResponseCache(sys.argv[1], 1e9, 1e9)
for number in range(20):
    cache.put(request_key("serper", {"q": f"{sys.argv[2]}-{number}"}), sys.argv[2], False)
cache.close()
"""


def test_processes_share_a_file(tmp_path: Path, server_environment: dict[str, str]) -> None:
    path = str(tmp_path / "cache.sqlite")
    command = [sys.executable, "-c", WRITER, path]
    writers = [subprocess.Popen([*command, name], env=server_environment) for name in "abc"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    cache = ResponseCache(path, 1e9, 1e9, replay=True)
    found = [cache.get(request_key("serper", {"q": f"{name}-{number}"})) for name in "abc" for number in range(20)]
    assert found == ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    cache.close()
