"""Addresses of services: which are refused, and how they are written."""

from __future__ import annotations

import logging
import re
import socket
from typing import Any

import pytest

from search_r1.errors import OnlineError, RetrieverAddressError, ServerError
from search_r1.evaluation.openai_sampler import OpenAISampler
from search_r1.http.client import check_addresses, is_loopback, retry_after_s
from search_r1.http.process import announce, bind
from search_r1.rewards.chat_endpoint import ChatOptions
from search_r1.search.client import RetrievalClient
from search_r1.search.online import OnlineOptions
from search_r1.tools.mcp_server import ServerAddress
from url_text import mask_text, without_credentials
from verl.errors import ConfigError

BROKEN = ["http://[::1:8000/", "http://[", "http://]", "http://host:port/x", "http://host:99999/x", "http://:8000/x"]


@pytest.mark.parametrize("url", BROKEN)
def test_a_malformed_address_is_refused_with_what_to_write(url: str, byte_tokenizer: Any) -> None:
    with pytest.raises(RetrieverAddressError, match="is not an address: write http://host:port/retrieve"):
        check_addresses([url])
    with pytest.raises(RetrieverAddressError):
        RetrievalClient(url)
    with pytest.raises(ConfigError, match="write http://host:port/v1"):
        OpenAISampler(url, "m", byte_tokenizer)
    with pytest.raises(ValueError, match="url must look like http://host:port/v1"):
        ChatOptions(url=url, model="m")
    with pytest.raises(OnlineError, match="is not an http"):
        OnlineOptions(endpoint=url).check()
    assert not is_loopback(url)


@pytest.mark.parametrize(
    "url", ["http://bot:pa/ssw0rd@h:bad/x", "http://bot:p?ss/w0rd@h:bad/x", "ftp://bot:w0rd@h:bad/x"]
)
def test_an_address_that_is_refused_is_shown_without_its_password(url: str, byte_tokenizer: Any) -> None:
    for check in (
        lambda: check_addresses([url]),
        lambda: OpenAISampler(url, "m", byte_tokenizer),
        lambda: OnlineOptions(endpoint=url).check(),
        lambda: ServerAddress.read({"url": url}),
    ):
        with pytest.raises(Exception, match=r"'(http|ftp)://\*\*\*@h:bad/x'") as caught:
            check()
        assert "w0rd" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bot:p@ssw0rd@h:1/x", "http://***@h:1/x"),
        ("http://bot:p?w0rd@h/x", "http://***@h/x"),
        ("http://bot:p,w0rd@h/a@b?c=d@e", "http://***@h/a@b?c=d@e"),
        ("http://bot:p@h?mail=a@b", "http://***@h?mail=a@b"),
        ("http://a:p@@h:1/x,http://b:q@i/y and c@d", "http://***@h:1/x,http://***@i/y and c@d"),
        ('{"url":"http://a:p@h","mail":"a@b"}', '{"url":"http://***@h","mail":"a@b"}'),
        ("http://h:1/a@b", "http://h:1/a@b"),
    ],
)
def test_a_password_is_hidden_up_to_the_host(text: str, shown: str) -> None:
    assert without_credentials(text) == mask_text(text) == shown


@pytest.mark.parametrize("url", ["http://[::1]:8000/retrieve", "https://host/x", "http://u:p@10.0.0.1:1/x"])
def test_an_address_is_accepted(url: str) -> None:
    check_addresses([url])


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1"])
def test_the_address_in_the_log_is_one_that_the_client_takes(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        try:
            listener = bind(host, 0)
        except ServerError:
            pytest.skip("this machine has no IPv6")
        with listener:
            listener.listen()
            announce("5 passages", listener, None)
            [url] = re.findall(r"on (http://\S+)", caplog.text)
            assert RetrievalClient(url).urls == (url,)
            assert is_loopback(url)
            place = re.sub(r"^http://|/retrieve$", "", url).rpartition(":")
            socket.create_connection((place[0].strip("[]"), int(place[2])), 5).close()


def test_an_address_in_use_is_named_as_in_a_url() -> None:
    try:
        taken = bind("::1", 0)
    except ServerError:
        pytest.skip("this machine has no IPv6")
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"cannot listen on \[::1\]:{port}: "):
            bind("::1", port)


def test_an_address_is_taken_before_its_server_listens_and_free_once_it_has_ended() -> None:
    """Connections that have just ended keep the address of their server for a minute."""
    with bind("127.0.0.1", 0) as loading:
        address = loading.getsockname()
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{address[1]}: .*stop what uses it"):
            bind(*address)
        loading.listen()
        with socket.create_connection(address, 5) as client:
            loading.accept()[0].close()
            assert client.recv(1) == b""
    bind(*address).close()


def test_a_port_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ServerError, match="--port is 99999; it must be from 0 to 65535"):
        bind("127.0.0.1", 99999)


@pytest.mark.parametrize("header", ["Mon, 01 Jan 99999999999999 00:00:00 GMT", "nan", "1e999", "-5", "soon", "", None])
def test_a_pause_that_cannot_be_read_is_none(header: str | None) -> None:
    assert retry_after_s(header) == 0
