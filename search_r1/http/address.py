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
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def check_addresses(urls: Iterable[str]) -> None:
    """Raise `RetrieverAddressError` unless each of `urls` is http:// or https:// with a host."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            shown = without_credentials(url) if "://" in url else url.rpartition("@")[2]
            raise RetrieverAddressError(f"{shown!r} is not an address: write http://host:port/retrieve")
