"""User and password in a server's address are used, and never shown: not in an error, not in a log line."""

from __future__ import annotations

import base64
import logging

import pytest
from fastapi import Response
from search_clients import Peer, search

from search_r1.errors import RetrieverError
from search_r1.search.mcp_server.remote_server import HttpSource

SECRET = "hunter2"


def _address(url: str) -> str:
    return url.replace("http://", f"http://user:{SECRET}@") + "/retrieve"


def test_the_server_is_asked_in_that_name(run_app) -> None:
    peer = Peer()
    assert search(_address(run_app(peer.app)))[0]["contents"] == "about q"
    in_base64 = base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert [headers["Authorization"] for headers in peer.headers] == [f"Basic {in_base64}"]


@pytest.mark.parametrize("answer", [Response("no", 403), Response("down", 502), Response("<html>")])
def test_no_error_or_log_line_shows_them(run_app, answer: Response, caplog: pytest.LogCaptureFixture) -> None:
    url = run_app(Peer(answer, forever=True).app)
    with caplog.at_level(logging.DEBUG), pytest.raises(RetrieverError) as caught:
        search(_address(url), deadline_s=1.5)
    host = url.removeprefix("http://")
    assert f"http://***@{host}/retrieve" in str(caught.value)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("search_r1")]
    assert SECRET not in str(caught.value) and not any(SECRET in line for line in ours)
    assert bool(ours) == (answer.status_code == 502)  # the pause that the circuit breaker gives


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_neither_does_an_address_without_a_server(scheme: str) -> None:
    with pytest.raises((RetrieverError, ValueError)) as caught:  # the latter for what is no address of a server
        search(f"{scheme}://user:{SECRET}@127.0.0.1:1/retrieve", deadline_s=0.3)
    assert SECRET not in str(caught.value) and f"{scheme}://***@127.0.0.1:1" in str(caught.value)


def test_nor_does_an_address_without_a_scheme() -> None:
    with pytest.raises(ValueError, match="'127.0.0.1:1/retrieve' is not an address") as caught:
        HttpSource(f"user:{SECRET}@127.0.0.1:1/retrieve", 1.0)
    assert SECRET not in str(caught.value)


def test_both_a_token_and_a_password_are_refused(run_app) -> None:
    url = run_app(Peer(Response("{}")).app)
    with pytest.raises(RetrieverError, match="Cannot combine") as caught:
        search(_address(url), token="t0ken-t0ken", deadline_s=1.0)
    assert SECRET not in str(caught.value) and "t0ken" not in str(caught.value)


def test_the_name_of_a_source_is_for_all_to_read() -> None:
    assert HttpSource(f"http://user:{SECRET}@a:1/r, http://b:2/r", 1.0).name == "http://***@a:1/r, http://b:2/r"
