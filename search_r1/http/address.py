"""Addresses of services: validated, and shown without passwords."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from search_r1.errors import RetrieverAddressError

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def without_credentials(text: str) -> str:
    """`text` with `***` for `user:password` in its URLs: what messages, logs and reports may show."""
    return _CREDENTIALS.sub("***", text)


def addresses_of(urls: str | Iterable[str]) -> list[str]:
    """The addresses in a list, or in a text that separates them by commas, without empty ones."""
    return [url.strip() for url in (urls.split(",") if isinstance(urls, str) else urls) if url.strip()]


def is_loopback(url: str) -> bool:
    """Whether the service is on this machine. A proxy named by the environment (`http_proxy`) cannot reach it there."""
    host = ""
    with suppress(ValueError):  # of a malformed address, or of a name
        host = urlsplit(url).hostname or ""
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def is_http_address(url: str) -> bool:
    """Whether `url` is http:// or https:// with a host, and a port of 1 to 65535 if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, a port that is no number or too large
        return False


def host_and_port(host: str, port: int) -> str:
    """The two as they stand in a URL: the colons of an IPv6 address are in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_addresses(urls: Iterable[str]) -> None:
    """Raise `RetrieverAddressError` unless each of `urls` is http:// or https:// with a host."""
    for url in urls:
        if not is_http_address(url):
            shown = without_credentials(url) if "://" in url else url.rpartition("@")[2]
            raise RetrieverAddressError(f"{shown!r} is not an address: write http://host:port/retrieve")
