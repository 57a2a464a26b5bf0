"""The settings of an online engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from search_r1.errors import OnlineError
from search_r1.http.client import is_http_address
from search_r1.search.online.deny_list import BENCHMARK_PAGES
from url_text import refused_address

CacheMode = Literal["off", "memory", "record", "replay"]
_POSITIVE = ("timeout_s", "deadline_s", "max_attempts", "keep_s", "keep_empty_s", "per_second", "concurrency")


@dataclass(frozen=True)
class OnlineOptions:
    """The settings of an online engine. All have defaults; only Google needs one (`fields={"cx": ...}`)."""

    endpoint: str | None = None
    """The address to use instead of the engine's own, for example that of a proxy."""
    api_key_file: str | None = None
    """A file that holds only the API key; None: the engine's environment variable."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request, as the engine documents them, for example {"gl": "us", "hl": "en"}."""
    cache_mode: CacheMode = "memory"
    """memory: answers are kept while the process runs. record: they are kept in a file. replay: no requests; a query
    that is not in the file is an error. off: every query is sent, and paid, again."""
    cache_path: str | None = None
    """The SQLite file of the response cache, for `record` and `replay`."""
    keep_s: float = math.inf
    """Seconds for which `memory` and `record` reuse a stored answer. `replay` accepts any age."""
    keep_empty_s: float = 3600.0
    """The same for an answer without results."""
    per_second: float | None = None
    """Requests per second; None: what a small plan of the engine allows."""
    concurrency: int | None = None
    """Requests at the same time; None: the engine's default."""
    timeout_s: float = 10.0
    """Seconds for one HTTP attempt."""
    deadline_s: float = 30.0
    """Seconds for one query with its retries, from its first attempt. The caller limits the wait for its turn."""
    max_attempts: int = 4
    """HTTP attempts for one query."""
    deny: tuple[str, ...] = BENCHMARK_PAGES
    """Domains and URL patterns whose pages are never served."""
    deny_file: str | None = None
    """A file with more of them, one per line."""
    price_per_1000: float = 0.0
    """Price of 1,000 answered requests, in any currency, for the cost counter."""

    def check(self) -> None:
        """Raises `OnlineError` for an invalid value."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OnlineError(f"{name} is {value}; it must be more than 0")
        # The number of queries that a second takes is told to clients, and the cost is a sum.
        if self.per_second == math.inf:
            raise OnlineError("per_second is inf; it must be a number of requests, such as 1000")
        if not 0 <= self.price_per_1000 < math.inf:
            raise OnlineError(f"price_per_1000 is {self.price_per_1000}; it must be 0 or more")
        if self.cache_mode not in get_args(CacheMode):
            raise OnlineError(f"the cache mode is {self.cache_mode!r}; it is one of {', '.join(get_args(CacheMode))}")
        if (self.cache_mode in ("record", "replay")) != (self.cache_path is not None):
            raise OnlineError("a cache path and the cache mode record or replay go together; only one is set")
        if self.endpoint is not None and not is_http_address(self.endpoint):
            raise OnlineError(f"the endpoint {refused_address(self.endpoint)!r} is not an http:// or https:// URL")
