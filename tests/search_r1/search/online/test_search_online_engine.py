"""Online engines over HTTP: a real server on a free port answers in each engine's shape, or misbehaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from e2e_world import free_port
from fastapi import FastAPI, Request, Response
from search_engines import SHAPES, Engine

from search_r1.errors import OnlineError, OnlineRejected, OnlineReplyError, OnlineUnavailable
from search_r1.http.client import is_loopback, retry_after_s
from search_r1.search.online import PROVIDERS, OnlineOptions, OnlineSource, load_online
from search_r1.search.online import transport as transport_module

KEY = "k3y/with+signs=AbCdEf"
VARIABLES = ("SERPER_API_KEY", "SERPAPI_API_KEY", "GOOGLE_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY")
Act = Callable[[OnlineSource], Awaitable[Any]]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, f" {KEY}\n")
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE_S", 0.02)


def _load(url: str, name: str = "serper", **options: Any) -> OnlineSource:
    if name == "google":
        options["fields"] = {"cx": "engine-1"}
    return load_online(name, OnlineOptions(endpoint=f"{url}/engine", **{"per_second": 1000.0} | options))


def _with_source(url: str, act: Act, name: str = "serper", **options: Any) -> Any:
    async def main() -> Any:
        source = _load(url, name, **options)
        try:
            return await act(source)
        finally:
            await source.close()

    return asyncio.run(main())


def _search(url: str, queries: list[str], k: int = 3, name: str = "serper", **options: Any) -> Any:
    return _with_source(url, lambda source: source.search(queries, k), name, **options)


@pytest.mark.parametrize("name", PROVIDERS)
def test_documents_by_http_and_the_key_where_the_engine_wants_it(run_app, name: str) -> None:
    engine = Engine(name)
    url = run_app(engine.app)
    one, none, blank, again = _search(url, ["lune", "nothing", " \n", " lune "], 2, name, deny=("denied.org",))
    assert [document["url"] for document, _ in one] == ["https://a.org/lune", "https://b.org/lune"]
    assert [score for _, score in one] == ([0.5, 0.5] if name == "tavily" else [1.0, 1 / 3])
    assert one[0][0]["contents"] == '"lune"\nAbout lune.' and one[0][0]["source"] == name
    assert none == blank == [] and again == one
    assert sorted(engine.asked) == ["lune", "nothing"]
    request = engine.requests[0][0]
    sent = {
        "serper": request.headers.get("X-API-KEY"),
        "serpapi": request.query_params.get("api_key"),
        "google": request.query_params.get("key"),
        "brave": request.headers.get("X-Subscription-Token"),
        "tavily": (request.headers.get("Authorization") or "").removeprefix("Bearer "),
    }
    assert sent[name] == KEY and request.headers["Accept"] == "application/json"
    assert request.query_params.get("cx") == ("engine-1" if name == "google" else None)


def test_an_engine_on_this_machine_is_not_asked_through_a_proxy(run_app, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("serper")
    url = run_app(engine.app)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    assert _search(url, ["lune"], max_attempts=1)[0]


def test_what_is_on_this_machine() -> None:
    here = (
        "http://127.0.0.1:1/v1",
        "http://127.8.8.8",
        "http://[::1]:80/",
        "https://LocalHost/x",
        "http://a.localhost",
    )
    elsewhere = ("http://localhost.org", "http://10.0.0.1", "http://[2001:db8::1]/", "https://api.org/127.0.0.1")
    assert all(map(is_loopback, here)) and not any(map(is_loopback, elsewhere))


def test_further_fields_and_an_endpoint_with_parameters(run_app) -> None:
    engine = Engine("serpapi")
    endpoint = f"{run_app(engine.app)}/engine?tenant=7"

    async def main() -> None:
        online = load_online("serpapi", OnlineOptions(endpoint=endpoint, fields={"engine": "bing", "gl": "us"}))
        await online.search(["lune"], 3)
        await online.close()

    asyncio.run(main())
    ours = {"q": "lune", "num": "10", "api_key": KEY}
    assert dict(engine.requests[0][0].query_params) == {"tenant": "7", "engine": "bing", "gl": "us"} | ours


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_trouble_that_may_pass_is_retried(run_app, status: int) -> None:
    engine = Engine("serper", Response("busy", status), Response("busy", status))
    assert len(_search(run_app(engine.app), ["lune"])[0]) == 3
    assert engine.asked == ["lune"] * 3


def test_a_list_that_is_answered_as_a_whole_waits_for_the_retries_of_each_query(run_app) -> None:
    """As over MCP, where one refusal would take the answers of all queries; the routes answer each query by itself."""
    engine = Engine("serper", Response("busy", 503))
    assert [len(hits) for hits in _search(run_app(engine.app), ["lune", "osk"])] == [3, 3]
    assert len(engine.asked) == 3
    engine = Engine("serper", Response("busy", 503))
    outcomes = _with_source(run_app(engine.app), lambda source: source.search_encoded(["lune", "osk"], 3))
    assert sum(isinstance(outcome, OnlineUnavailable) for outcome in outcomes) == 1


def test_retry_after_holds_back_every_query_of_the_engine(run_app, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("serper", Response("slow down", 429, headers={"Retry-After": "1"}))
    refusals: list[float] = []

    def read_refusal(header: str | None) -> float:
        refusals.append(retry_after_s(header))
        return refusals[-1]

    monkeypatch.setattr(transport_module, "retry_after_s", read_refusal)

    async def act(source: OnlineSource) -> None:
        first = asyncio.ensure_future(source.search(["first"], 3))
        while not refusals:
            await asyncio.sleep(0.01)
        await source.search(["second"], 3)
        await first

    _with_source(run_app(engine.app), act)
    assert sorted(engine.asked) == ["first", "first", "second"]
    assert engine.times[1] - engine.times[0] >= 1.0


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(run_app) -> None:
    engine = Engine("serper", Response("used up", 429, headers={"Retry-After": "3600"}))

    async def act(source: OnlineSource) -> None:
        with pytest.raises(OnlineUnavailable, match="HTTP 429: used up"):
            await source.search(["lune"], 3)
        with pytest.raises(OnlineUnavailable, match="rate limit"):
            await source.search(["other"], 3)

    _with_source(run_app(engine.app), act)
    assert engine.asked == ["lune"]


def test_attempts_are_counted(run_app) -> None:
    engine = Engine("serper", *[Response("down", 500)] * 5)
    with pytest.raises(OnlineUnavailable, match="3 attempts; last: HTTP 500: down"):
        _search(run_app(engine.app), ["lune"], max_attempts=3)
    assert len(engine.asked) == 3


def test_a_slow_engine_is_asked_again_and_a_silent_one_is_unavailable(run_app) -> None:
    engine = Engine("serper", 60.0)
    assert len(_search(run_app(engine.app), ["lune"], timeout_s=1.0, deadline_s=50.0)[0]) == 3
    assert len(engine.asked) >= 2  # more where the second one is slow too
    with pytest.raises(OnlineUnavailable, match="no answer to one request"):
        _search(run_app(Engine("serper", delay_s=20.0).app), ["lune"], timeout_s=0.3, max_attempts=1)
    with pytest.raises(OnlineUnavailable, match="ClientConnectorError"):
        _search(f"http://127.0.0.1:{free_port()}", ["lune"])


class PickyEngine:
    """An engine that answers `status` to what `refuses`, and otherwise finds pages."""

    def __init__(self, name: str, status: int, refuses: Callable[[str], bool]) -> None:
        self.asked: list[str] = []
        self.app = FastAPI()

        @self.app.api_route("/engine", methods=["GET", "POST"])
        async def answer(request: Request) -> Response:
            fields = json.loads(await request.body()) if request.method == "POST" else dict(request.query_params)
            query = fields.get("q") or fields["query"]
            self.asked.append(query)
            return Response("no", status) if refuses(query) else Response(json.dumps(SHAPES[name](query)))


@pytest.mark.parametrize("status", [400, 413, 414, 422, 431, 451])
@pytest.mark.parametrize("name", PROVIDERS)
def test_a_query_of_a_length_or_content_that_the_engine_refuses_finds_nothing(
    run_app, caplog, name: str, status: int
) -> None:
    long = "what is the capital of the country in which the river rises " * 7  # 420 characters, 84 words
    engine = PickyEngine(name, status, lambda query: len(query) > 400 or "forbidden" in query)

    async def act(source: OnlineSource) -> None:
        found, forbidden, good = await source.search([long, "forbidden", "good"], 3)
        assert len(good) == 3 and forbidden == []
        cuts = {"brave": len(long[:300].rstrip()) - len(" of the country"), "tavily": 400}
        assert len(found) == (3 if name in cuts else 0)
        assert len(max(engine.asked, key=len)) <= cuts.get(name, 420)
        num_asked = len(engine.asked)
        assert await source.search(["forbidden"], 3) == [[]] and len(engine.asked) == num_asked, "not paid again"
        assert source.usage.refused == (1 if name in cuts else 2)

    _with_source(run_app(engine.app), act, name)
    assert f"{name} refused the request with HTTP {status}: no" in caplog.text


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_an_engine_that_refuses_every_query_is_an_error(run_app, status: int) -> None:
    engine = PickyEngine("serper", status, lambda query: True)
    with pytest.raises(OnlineRejected, match=f"serper refused the request with HTTP {status}"):
        _search(run_app(engine.app), ["lune"])
    assert engine.asked == (["lune", "health check"] if status in (400, 422) else ["lune"])


def test_a_refused_query_is_recorded_and_replayed(run_app, tmp_path: Path) -> None:
    engine = PickyEngine("serper", 400, lambda query: query == "bad")
    url, cache = run_app(engine.app), {"cache_path": str(tmp_path / "cache.sqlite")}
    for mode in ("record", "replay"):
        assert _search(url, ["bad"], cache_mode=mode, **cache) == [[]]
    assert engine.asked == ["bad", "health check"]


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_refusal_is_not_retried(run_app, status: int) -> None:
    engine = Engine("serper", Response('{"message": "no"}', status, headers={"Location": "/engine"}))
    with pytest.raises(OnlineRejected, match=f"serper refused the request with HTTP {status}: .*no"):
        _search(run_app(engine.app), ["lune"])
    assert engine.asked == ["lune"]


@pytest.mark.parametrize(
    "body",
    [
        "<html>sign in</html>",
        "",
        '{"organic": [',
        '{"organic": "text"}',
        '{"organic": [{"title": NaN, "link": "https://a.org"}]}',
        '{"message": "Not enough credits"}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
    ids=["html", "empty", "cut", "text", "nan", "message", "deep", "bytes"],
)
def test_an_answer_of_another_shape_is_an_error_and_is_not_stored(run_app, tmp_path: Path, body: Any) -> None:
    engine = Engine("serper", Response(body))
    url, cache = run_app(engine.app), {"cache_mode": "record", "cache_path": str(tmp_path / "cache.sqlite")}
    with pytest.raises(OnlineReplyError, match="serper answered, but not with search results"):
        _search(url, ["lune"], **cache)
    assert len(_search(url, ["lune"], **cache)[0]) == 3
    assert engine.asked == ["lune", "lune"]


def test_an_endless_answer_is_an_error(run_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_MAX_BODY_BYTES", 1000)
    with pytest.raises(OnlineReplyError, match="more than 1000 bytes"):
        _search(run_app(Engine("serper", Response(" " * 2000)).app), ["lune"])


def test_one_failed_query_is_an_error_and_the_others_are_paid_once(run_app, tmp_path: Path) -> None:
    engine = Engine("serper", Response("no", 403))
    cache = {"cache_mode": "record", "cache_path": str(tmp_path / "cache.sqlite"), "concurrency": 1}
    url = run_app(engine.app)
    with pytest.raises(OnlineRejected):
        _search(url, ["bad", "good"], **cache)
    assert [len(found) for found in _search(url, ["bad", "good"], **cache)] == [3, 3]
    assert engine.asked == ["bad", "good", "bad"]


def test_at_most_so_many_requests_at_a_time(run_app) -> None:
    engine = Engine("serper", delay_s=0.05, company=3)
    queries = [f"q{number}" for number in range(12)]
    found = _search(run_app(engine.app), queries, concurrency=3, timeout_s=60.0, deadline_s=60.0)
    assert [hits[0][0]["title"] for hits in found] == queries
    assert engine.most_running == 3 and sorted(engine.asked) == sorted(queries)


def test_a_question_in_flight_is_asked_once_and_each_has_its_own_copy(run_app) -> None:
    engine = Engine("serper", delay_s=0.3)

    async def act(source: OnlineSource) -> None:
        calls = [asyncio.ensure_future(source.search(["lune"], k)) for k in (1, 2, 2)]
        await asyncio.sleep(0.05)
        calls[1].cancel()
        [one], [two] = await calls[0], await calls[2]
        assert len(one) == 1 and len(two) == 2 and one[0] == two[0]
        assert one[0][0] is not two[0][0]
        assert engine.asked == ["lune"]

    _with_source(run_app(engine.app), act)


def test_a_question_nobody_waits_for_is_not_asked(run_app) -> None:
    engine = Engine("serper")
    engine.door.clear()

    async def act(source: OnlineSource) -> None:
        running = asyncio.ensure_future(source.search(["running"], 3))
        waiting = asyncio.ensure_future(source.search(["waiting"], 3))
        while not engine.asked:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.door.set()
        await running
        assert len((await source.search(["next"], 3))[0]) == 3

    _with_source(run_app(engine.app), act, concurrency=1)
    assert engine.asked == ["running", "next"]


def test_close_ends_what_waits(run_app) -> None:
    async def main() -> None:
        source = _load(run_app(Engine("serper", delay_s=20.0).app))
        waiting = asyncio.ensure_future(source.search(["lune"], 3))
        await asyncio.sleep(0.1)
        await source.close()
        with pytest.raises(OnlineUnavailable, match="closed"):
            await waiting

    asyncio.run(main())


def test_the_cost_counter(run_app, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("serper", Response("busy", 500), Response("no", 403))

    async def act(source: OnlineSource) -> OnlineSource:
        await source.search(["a"], 3)  # 500, then 403
        return source

    caplog.set_level(logging.INFO)
    cache = {"cache_mode": "record", "cache_path": str(tmp_path / "cache.sqlite"), "price_per_1000": 2.0}
    url = run_app(engine.app)
    with pytest.raises(OnlineRejected):
        _with_source(url, act, **cache)
    assert (
        "serper: 1 queries, 0 from the cache, 2 attempts, 0 answered, 1 failed, 0 refused, cost 0.0000" in caplog.text
    )

    async def more(source: OnlineSource) -> None:
        await source.search(["a", "b", "a"], 3)
        await source.search(["a"], 10)
        assert source.usage.cost == pytest.approx(2 * 2.0 / 1000)

    _with_source(url, more, **cache)
    assert (
        "serper: 4 queries, 1 from the cache, 2 attempts, 2 answered, 0 failed, 0 refused, cost 0.0040" in caplog.text
    )


def test_the_key_is_in_no_log_no_error_and_no_cache(run_app, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in PROVIDERS:
        path = tmp_path / f"{name}.sqlite"
        echo = json.dumps(SHAPES[name](f"{KEY} {quote(KEY, safe='')}"))
        refusals = [Response(f"wrong key {KEY}", 401), Response(f"{' ' * 195}{KEY}", 401)]
        engine = Engine(name, *refusals, Response(KEY), Response(echo))
        url = run_app(engine.app)
        while engine.script:
            try:
                shown = str(_search(url, ["x"], 3, name, cache_mode="record", cache_path=str(path)))
            except OnlineError as error:
                causes = [error, error.__cause__, error.__context__]
                shown = " ".join(f"{cause} {cause!r}" for cause in causes)
            assert KEY[:5] not in shown and "k3y%2F" not in shown
        assert path.stat().st_size > 0 and b"[api key]" in path.read_bytes()
        assert b"k3y" not in path.read_bytes()
    assert "k3y" not in caplog.text


@pytest.mark.parametrize("text", ["", "short", "two words of it", "line\nline-line", "k\u00e9y-k\u00e9y-key"])
def test_an_unusable_key_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SERPER_API_KEY", text)
    with pytest.raises(OnlineError, match="SERPER_API_KEY must be one word") as caught:
        load_online("serper")
    assert not text or text not in str(caught.value)


def test_a_key_from_a_file(run_app, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(OnlineError, match="set SERPER_API_KEY"):
        load_online("serper")
    file = tmp_path / "key"
    with pytest.raises(OnlineError, match=f"cannot read the API key file {file}"):
        load_online("serper", OnlineOptions(api_key_file=str(file)))
    file.write_text("key-of-the-file\n")
    engine = Engine()
    _search(run_app(engine.app), ["x"], api_key_file=str(file))
    assert engine.requests[0][0].headers["X-API-KEY"] == "key-of-the-file"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bing", {}, "no online engine 'bing'; choose one of serper, serpapi, google, brave, tavily"),
        ("google", {}, "google needs the request field 'cx'"),
        ("serpapi", {"fields": {"api_key": KEY}}, "must not be in the request fields"),
        ("google", {"fields": {"cx": "1", "key": KEY}}, "must not be in the request fields"),
        ("serper", {"timeout_s": 0.0}, "timeout_s is 0.0"),
        ("serper", {"per_second": -1.0}, "per_second is -1.0"),
        ("serper", {"per_second": float("inf")}, "per_second is inf"),
        ("serper", {"price_per_1000": float("nan")}, "price_per_1000 is nan"),
        ("serper", {"deadline_s": float("nan")}, "deadline_s is nan"),
        ("serper", {"cache_mode": "on"}, "it is one of off, memory, record, replay"),
        ("serper", {"cache_mode": "record"}, "go together"),
        ("serper", {"cache_path": "x"}, "go together"),
        ("serper", {"endpoint": "example.org"}, "not an http"),
        ("serper", {"deny_file": "/gone/deny.txt"}, "cannot read the deny list"),
    ],
)
def test_wrong_settings_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OnlineError, match=message) as caught:
        load_online(name, OnlineOptions(**options))
    assert KEY not in str(caught.value)
