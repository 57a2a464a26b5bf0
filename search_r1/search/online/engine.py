"""An online engine as a source of passages: cache, one request for the same question asked twice, deny-list, costs.

Every query has its own outcome, and an answer that is paid for is kept, whoever has left by the time it comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from search_r1.errors import OnlineBusy, OnlineReplyError, OnlineUnavailable, ReplayMissError, SearchError
from search_r1.http.address import without_credentials
from search_r1.http.api_key import ApiKey
from search_r1.http.response_cache import RequestKey, ResponseCache, request_key
from search_r1.search.online.deny_list import DenyList, read_deny_file
from search_r1.search.online.documents import to_documents
from search_r1.search.online.memory_cache import MemoryCache
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.providers import Fields, Provider, Result
from search_r1.search.online.rate_limit import RateLimit
from search_r1.search.online.transport import Patience, Transport, shown
from search_r1.search.online.usage import Usage
from search_r1.search.server.source_interface import Answer, Found, Outcome, decode_answers, encode_answer, version_of

_LOG = logging.getLogger(__name__)
_LEAST_RESULTS = 10  # costs the same as fewer; one answer serves every smaller k, also with denied pages left out
_REPLY_S = 0.5  # kept of a client's time, at most, for the reply to reach it


@dataclass
class _Flight:
    """A question that is being answered, and how many wait for it."""

    fields: Fields
    key: RequestKey
    patience: Patience = field(default_factory=Patience)
    waiters: int = 0
    task: asyncio.Task[Answer] = field(init=False)


class OnlineSource:
    """See `Source`. Made by `load_online`; used from one event loop at a time.

    At most `Provider.max_results` documents a query. `usage` counts what was asked.
    """

    num_passages: int | None = None

    def __init__(self, provider: Provider, options: OnlineOptions, key: ApiKey | None) -> None:
        """Without a `key` only stored answers are replayed. Raises `OnlineError` for an unusable file."""
        self.name = provider.name
        self.usage = Usage(price_per_1000=options.price_per_1000)
        self._provider = provider
        self._options = options
        self._key = key
        denied = [*options.deny, *(read_deny_file(options.deny_file) if options.deny_file else ())]
        self._deny = DenyList(denied)
        self._limit = RateLimit(options.per_second or provider.per_second)
        endpoint = without_credentials(options.endpoint or provider.endpoint)
        self.version = version_of(provider.name, endpoint, dict(options.fields), sorted(denied))
        self.batch_size: int | None = max(
            1, int(self._limit.per_second)
        )  # a second's worth: none waits much for others
        self._cache = _open_cache(options)
        self._cache_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response-cache")
        self._flights: dict[str, _Flight] = {}
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, queries: list[str], k: int) -> list[list[Found]]:
        """See `Source.search`. Raises an `OnlineError` when one of the queries has no answer.

        The others are awaited first: what was paid for is stored.
        """
        return decode_answers(await self.search_encoded(queries, k))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`. A query that has no answer in `wait_s` has an error that says when to come again."""
        self._attach()
        wait_s = max(0.0, wait_s - min(_REPLY_S, wait_s / 4))
        num_results = min(max(k, _LEAST_RESULTS), self._provider.max_results)
        plain = [" ".join(query.encode("utf-8", "replace").decode().split()) for query in queries]
        self.usage.queries += len(queries)
        with self._flights_of([query for query in dict.fromkeys(plain) if query], num_results, wait_s) as flights:
            if flights:
                await asyncio.wait(_awaited(flights.values()), timeout=None if wait_s == math.inf else wait_s)
            outcomes: dict[str, Outcome] = {query: self._outcome(flight) for query, flight in flights.items()}
        found = [outcomes.get(query, ()) for query in plain]
        return [outcome if isinstance(outcome, SearchError) else outcome[:k] for outcome in found]

    @property
    def per_second(self) -> float:
        """The rate that is kept."""
        return self._limit.per_second

    async def close(self) -> None:
        """End the requests that run, and log what was asked and what it costs."""
        for flight in self._flights.values():
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in self._flights.values()), return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()
        self._cache_thread.shutdown(wait=True)
        if self._cache is not None:
            self._cache.close()
        _LOG.info("%s: %s", self.name, self.usage)

    def _attach(self) -> None:
        """Belong to the running loop. A loop that was closed took its connections with it."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this OnlineSource belongs to another event loop")
        self._loop, self._flights = loop, {}
        if self._key is not None:
            self._transport = Transport(self._provider, self._options, self._key, self._limit, self.usage)

    @contextmanager
    def _flights_of(self, queries: list[str], num_results: int, wait_s: float) -> Iterator[dict[str, _Flight]]:
        """The flights that answer the questions, while one waits for them who waits `wait_s`."""
        flights = {query: self._join(query, num_results, time.monotonic() + wait_s) for query in queries}
        try:
            yield flights
        finally:
            for flight in flights.values():
                self._leave(flight)

    def _join(self, query: str, num_results: int, until: float) -> _Flight:
        """The flight that answers this question, or a new one."""
        fields = self._provider.build(query, num_results) | dict(self._options.fields)
        key = request_key(self.name, fields)
        flight = self._flights.get(key.digest)
        if flight is None:
            flight = self._flights[key.digest] = _Flight(fields, key)
            flight.task = asyncio.ensure_future(self._find(flight))
            flight.task.add_done_callback(lambda task: self._landed(flight, task))
        flight.waiters += 1
        flight.patience.until = max(flight.patience.until, until)
        return flight

    def _leave(self, flight: _Flight) -> None:
        """One stops waiting. A question nobody waits for is not worth its money; one that is paid for is stored."""
        flight.waiters -= 1
        if flight.waiters:
            return
        flight.patience.until = -math.inf
        if not flight.patience.asked and not flight.task.done():
            self._flights.pop(flight.key.digest, None)  # who comes from now on must not join it
            flight.task.cancel()

    def _landed(self, flight: _Flight, task: asyncio.Task[Answer]) -> None:
        flight.patience.settle()
        if self._flights.get(flight.key.digest) is flight:
            del self._flights[flight.key.digest]
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), OnlineBusy):
            self.usage.failed += 1

    def _outcome(self, flight: _Flight) -> Outcome:
        """What became of a question by now. Raises what is no `SearchError`."""
        if not flight.task.done():
            return self._unfinished(flight.patience)
        if flight.task.cancelled():
            return OnlineUnavailable(f"the online engine {self.name} was closed")
        error = flight.task.exception()
        if error is None or isinstance(error, SearchError):
            return error or flight.task.result()
        raise error

    def _unfinished(self, patience: Patience) -> OnlineUnavailable:
        if patience.asked or self._transport is None:
            return OnlineUnavailable(f"{self.name} has not answered yet; the answer is kept for who comes again")
        return self._transport.busy(patience)

    async def _find(self, flight: _Flight) -> Answer:
        results = await self._stored(flight.key)
        if results is None:
            results = await self._ask(flight)
        else:
            self.usage.cache_hits += 1
        return encode_answer(to_documents(results, self.name, self._deny))

    async def _stored(self, key: RequestKey) -> list[Result] | None:
        if self._cache is None:
            return None
        body = await asyncio.get_running_loop().run_in_executor(self._cache_thread, self._cache.get, key)
        return None if body is None else self._read(body)

    async def _ask(self, flight: _Flight) -> list[Result]:
        key = flight.key
        if self._transport is None:
            raise ReplayMissError(
                f"{self._options.cache_path} has no answer of {self.name} to {key.text}; "
                "run once with the cache mode record"
            )
        body = await self._transport.ask(flight.fields, flight.patience)
        results = self._read(body)
        if self._cache is not None:
            store = asyncio.get_running_loop().run_in_executor(
                self._cache_thread, self._cache.put, key, body, not results
            )
            await store
        return results

    def _read(self, body: str) -> list[Result]:
        """The results in an answer. Raises `OnlineReplyError` for everything that is none."""
        try:
            return self._provider.parse(json.loads(body, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            raise OnlineReplyError(
                f"{self.name} answered, but not with search results ({error}): {shown(body)!r}"
            ) from error


def _awaited(flights: Collection[_Flight]) -> list[asyncio.Future[Any]]:
    """What a list waits for: not for what one of its queries tries again. A query alone waits for that as well."""
    return [flight.patience.settled if len(flights) > 1 else flight.task for flight in flights]


def _open_cache(options: OnlineOptions) -> ResponseCache | MemoryCache | None:
    if options.cache_mode == "memory":
        return MemoryCache(options.keep_s, options.keep_empty_s)
    if options.cache_path is None:
        return None
    replay = options.cache_mode == "replay"
    return ResponseCache(options.cache_path, options.keep_s, options.keep_empty_s, replay=replay)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
