"""What clients of HTTP services share: validated addresses, shown without passwords; API keys, read from the
environment or a file and never shown or stored; what to do about an error reply; objects that belong to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, quote_plus, urlsplit

from search_r1.errors import OnlineError, RetrieverAddressError
from text_file import read_text
from url_text import refused_address


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
            raise RetrieverAddressError(f"{refused_address(url)!r} is not an address: write http://host:port/retrieve")


_SHORTEST = 8  # a shorter text would be masked in the middle of ordinary words
_MASK = "[api key]"


class ApiKey:
    """A secret that only `reveal` shows."""

    def __init__(self, text: str, source: str) -> None:
        """Raises `OnlineError` if `text` cannot be a key; the message names `source` only."""
        text = text.strip()
        if len(text) < _SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
            raise OnlineError(
                f"the API key in {source} must be one word of at least {_SHORTEST} printable ASCII characters"
            )
        self._text = text

    def __repr__(self) -> str:
        return f"ApiKey({_MASK})"

    def reveal(self) -> str:
        """The key, for the request."""
        return self._text

    def mask(self, text: str) -> str:
        """`text` with the key masked, also where it is URL-encoded."""
        for form in {self._text, quote(self._text, safe=""), quote(self._text), quote_plus(self._text)}:
            text = text.replace(form, _MASK)
        return text


def read_key(variable: str, file: str | None) -> ApiKey:
    """The key in `file`, or else in the environment variable. Raises `OnlineError` if there is none."""
    if file is not None:
        key = read_text(Path(file), lambda reason: OnlineError(f"cannot read the API key file {reason}"))
        return ApiKey(key, f"the file {file}")
    if variable not in os.environ:
        raise OnlineError(f"no API key: set {variable} in the environment, or name a file that holds the key")
    return ApiKey(os.environ[variable], f"the variable {variable}")


SHOWN_CHARS = 300  # of a message
_TRY_LATER = frozenset({408, 425, 429})  # of the statuses that blame the client: too slow, too early, too many requests
_NEVER = frozenset({501, 505, 510, 511})  # of those that blame the server: it cannot do this at all
# 413, 414, 431: too long. 451: its content. 400, 422: either, or a request that is wrong whatever it asks.
_BLAMES_CONTENT = frozenset({400, 413, 414, 422, 431, 451})
_MOST_DOUBLINGS = 10


def is_temporary(status: int) -> bool:
    """Whether a request that had this HTTP status may succeed later, as it is.

    Proxies have statuses of their own from 520 on (unreachable, timed out, overloaded).
    """
    return status in _TRY_LATER or (status >= 500 and status not in _NEVER)


def may_blame_query(status: int) -> bool:
    """Whether a refusal with this HTTP status may be due to the length or the content of a query.

    It may also be due to the settings of the request, as all queries have them: another query tells.
    """
    return status in _BLAMES_CONTENT


def server_message(payload: bytes) -> str:
    """The server's message in an error reply: its `detail`, or the start of its text."""
    text = payload.decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["detail"])
    return text[:SHOWN_CHARS].strip() or "no message"


def retry_after_s(header: str | None) -> float:
    """Seconds to wait by a Retry-After header (seconds or an HTTP date); 0 if there is none, or it cannot be read."""
    if not header:
        return 0.0
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def backoff_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after attempt 1, 2, ...: exponential, capped, with jitter against retries in lockstep."""
    return min(longest_s, first_s * 2 ** min(attempt - 1, _MOST_DOUBLINGS)) * random.uniform(0.5, 1.0)


def entered_loop(current: asyncio.AbstractEventLoop | None, owner: str) -> asyncio.AbstractEventLoop | None:
    """The running event loop, or None if it is `current`, the loop that the object belongs to.

    On a new loop, connections must be opened again. Raises `RuntimeError` if `current` is another open loop.
    """
    loop = asyncio.get_running_loop()
    if current is loop:
        return None
    if current is not None and not current.is_closed():
        raise RuntimeError(f"this {owner} belongs to another event loop; close() it there first")
    return loop
