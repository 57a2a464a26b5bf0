"""`POST /page`: the page of a passage, over real HTTP and by the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from search_corpora import write_rows
from search_servers import address, listen, served

from search_r1.errors import CorpusError, RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.search.client import PageClient
from search_r1.search.corpus import Corpus
from search_r1.search.pages import Pages

ARTICLES = [("Velt", 2), ("Morn", 3), ("Velt", 1), ("", 2), ("Osk", 1)]
ROWS = [
    {
        "id": "",
        "contents": f'"{title}"\ntext {number} of {title or "nothing"} '
        if title
        else "\n" * number + f"alone {number}",
    }
    for title, count in ARTICLES
    for number in range(count)
]
IDS: dict[str, Callable[[int], str]] = {
    "row": str,
    "line": lambda row: str(row + 1),
    "name": lambda row: f"p{7 * row % 9}",
    "number": lambda row: str(8 - row),
}


@pytest.mark.parametrize("ids", list(IDS))
def test_a_page_has_the_neighbours_of_the_same_title(tmp_path: Path, ids: str) -> None:
    rows = [row | {"id": IDS[ids](number)} for number, row in enumerate(ROWS)]
    pages = Pages(Corpus(write_rows(tmp_path / "corpus.jsonl", *rows)))
    found = [pages.find(row["id"], 1000) for row in rows]
    texts = [
        *["text 0 of Velt\ntext 1 of Velt"] * 2,
        *["text 0 of Morn\ntext 1 of Morn\ntext 2 of Morn"] * 3,
        "text 0 of Velt",
        *["alone 0", "alone 1"],
        "text 0 of Osk",
    ]
    assert [page and page.text for page in found] == texts
    assert [page and page.title for page in found] == [title for title, count in ARTICLES for _ in range(count)]
    assert [page and page.num_passages for page in found] == [2, 2, 3, 3, 3, 1, 1, 1, 1]
    assert [page and page.start for page in found] == [0, 15, 0, 15, 30, 0, 0, 0, 0]
    assert not any(page and page.truncated for page in found)
    assert pages.find("99", 1000) is None and pages.find("", 1000) is None and pages.find("-1", 1000) is None
    cut = pages.find(rows[4]["id"], 20)
    assert cut is not None and (cut.text, cut.start, cut.truncated) == ("text 0 of Morn\ntext ", 20, True)


def test_an_id_that_a_policy_made_up_does_not_have_all_ids_of_a_numbered_corpus_read(tmp_path: Path) -> None:
    """One row is broken, which reading all of them would notice."""
    path = write_rows(tmp_path / "corpus.jsonl", *({"id": str(row), "contents": "T\ntext"} for row in range(3000)))
    lines = path.read_text().splitlines()
    for name, found in (("0", None), ("x0", CorpusError)):
        path.write_text("\n".join([lines[0].replace('"0"', f'"{name}"'), "broken", *lines[2:]]) + "\n")
        pages = Pages(Corpus(path))
        with nullcontext() if found is None else pytest.raises(found, match="line 2"):
            assert pages.find("77777", 1000) is None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rows = [row | {"id": f"p{number}"} for number, row in enumerate(ROWS)]
    corpus = write_rows(tmp_path_factory.mktemp("pages") / "corpus.jsonl", *rows)
    with served("--corpus_path", str(corpus), "--retriever_name", "bm25", RETRIEVAL_AUTH_TOKEN="s3cret") as url:
        yield url


def post(server: str, body: bytes | str, token: str = "s3cret") -> requests.Response:
    return requests.post(f"{server}/page", data=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def test_the_route(server: str) -> None:
    reply = post(server, '{"id": "p3"}')
    assert reply.status_code == 200 and reply.headers["X-Index-Version"]
    assert reply.json()["page"] == {
        "id": "p3",
        "title": "Morn",
        "text": "text 0 of Morn\ntext 1 of Morn\ntext 2 of Morn",
        "start": 15,
        "num_passages": 3,
        "truncated": False,
    }
    assert post(server, '{"id": "p3", "max_chars": 4}').json()["page"]["text"] == "text"
    assert post(server, '{"id": "p99"}').json() == {"page": None}
    assert post(server, '{"id": "p3"}', token="wrong").status_code == 401


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("{}", "id: Field required"),
        ('{"id": ""}', "id: String should have at least 1 character"),
        ('{"id": 3}', "id: Input should be a valid string"),
        ('{"id": "3", "max_chars": 0}', "max_chars: Input should be greater than or equal to 1"),
        ('{"id": "3", "max_char": 5}', 'max_char: unknown field; the nearest of id, max_chars is "max_chars"'),
        ("nonsense", "request: Invalid JSON"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(server: str, body: str, detail: str) -> None:
    reply = post(server, body)
    assert reply.status_code == 422 and detail in reply.json()["detail"]


@settings(deadline=None)
@given(name=st.text(max_size=40) | st.integers().map(str))
def test_any_id_has_an_answer(server: str, name: str) -> None:
    reply = post(server, json.dumps({"id": name}))
    assert reply.status_code == (200 if name else 422)


def ask(url: str, name: str, **options: Any) -> dict[str, Any] | None:
    async def run() -> dict[str, Any] | None:
        client = PageClient(url, **options)
        try:
            return await client.page(name, 1000)
        finally:
            await client.close()

    return asyncio.run(run())


def test_the_client_asks_another_server_if_one_is_down(server: str) -> None:
    listener = listen()
    urls = f"{address(listener)}/retrieve,{server}/retrieve"
    for name, title in [("p0", "Velt"), ("p8", "Osk")] * 2:
        found = ask(urls, name, token="s3cret")
        assert found is not None and found["title"] == title
    assert ask(urls, "p99", token="s3cret") is None
    listener.close()


def test_the_address_may_end_with_a_slash(server: str) -> None:
    """A search at it is redirected."""
    found = ask(f"{server}/retrieve/", "p0", token="s3cret")
    assert found is not None and found["title"] == "Velt"


def test_the_client_says_what_is_wrong(server: str, run_app: Callable[..., str]) -> None:
    with pytest.raises(RetrieverRejected, match="HTTP 401"):
        ask(f"{server}/retrieve", "p0")
    listener = listen()
    with pytest.raises(RetrieverUnavailable, match=r"is not available \(no page in 0.5 s; last: .*start one with"):
        ask(f"{address(listener)}/retrieve", "p0", deadline_s=0.5)
    listener.close()

    said = [b'{"page": "text"}', b"[" * 100_000]

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": said.pop()})

    url = f"{run_app(other)}/retrieve"
    while said:
        with pytest.raises(RetrieverReplyError, match="answered 200 but not with a page"):
            ask(url, "p0")


def test_an_online_engine_has_no_pages(serve: Callable[..., str], tmp_path: Path) -> None:
    """Its answers are replayed, so it needs no key."""
    cache = tmp_path / "cache.sqlite"
    url = serve("--retriever_name", "serper", "--online_cache", str(cache), SERPER_API_KEY="no-real-key")
    with pytest.raises(RetrieverRejected, match="HTTP 404: serper has no pages; /page needs a server with a corpus"):
        ask(f"{url}/retrieve", "p0")
