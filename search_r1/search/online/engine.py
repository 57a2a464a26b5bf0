"""An online engine as a source of passages: cache, one request for the same question asked twice, deny-list, costs."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from search_r1.search.errors import OnlineReplyError, OnlineUnavailable, ReplayMissError
from search_r1.search.online.api_key import ApiKey
from search_r1.search.online.deny_list import DenyList, read_deny_file
from search_r1.search.online.documents import to_documents
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.provider import Fields, Provider, Result
from search_r1.search.online.rate_limit import RateLimit
from search_r1.search.online.response_cache import RequestKey, ResponseCache, request_key
from search_r1.search.online.transport import Transport, shown
from search_r1.search.online.usage import Usage
from search_r1.search.source import Found

_LOG = logging.getLogger(__name__)
_LEAST_RESULTS = 10  # costs the same as fewer; one answer serves every smaller k, also with denied pages left out


@dataclass
class _Flight:
    """A question that is being answered, and how many wait for it."""

    task: asyncio.Task[list[Found]]
    waiters: int = 0


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
        self._deny = DenyList([*options.deny, *(read_deny_file(options.deny_file) if options.deny_file else ())])
        self._limit = RateLimit(options.per_second or provider.per_second)
        self._cache = _open_cache(options)
        self._cache_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response-cache")
        self._flights: dict[str, _Flight] = {}
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, queries: list[str], k: int) -> list[list[Found]]:
        """See `Source.search`. Raises an `OnlineError` when one of the queries has no answer.

        The others are awaited first: what was paid for is stored.
        """
        self._attach()
        num_results = min(max(k, _LEAST_RESULTS), self._provider.max_results)
        plain = [" ".join(query.encode("utf-8", "replace").decode().split()) for query in queries]
        self.usage.queries += len(queries)
        flights = {query: self._join(query, num_results) for query in dict.fromkeys(plain) if query}
        try:
            outcomes = await asyncio.gather(
                *(asyncio.shield(flight.task) for flight in flights.values()), return_exceptions=True
            )
        finally:
            for flight in flights.values():
                _leave(flight)
        answers: dict[str, list[Found]] = {"": []}
        for query, outcome in zip(flights, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                raise OnlineUnavailable(f"the online engine {self.name} was closed")
            if isinstance(outcome, BaseException):
                raise outcome
            answers[query] = outcome
        return [[(dict(document), score) for document, score in answers[query][:k]] for query in plain]

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

    def _join(self, query: str, num_results: int) -> _Flight:
        """The flight that answers this question, or a new one."""
        fields = self._provider.build(query, num_results) | dict(self._options.fields)
        key = request_key(self.name, fields)
        flight = self._flights.get(key.digest)
        if flight is None:
            flight = self._flights[key.digest] = _Flight(asyncio.ensure_future(self._find(fields, key)))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        return flight

    def _landed(self, key: RequestKey, task: asyncio.Task[list[Found]]) -> None:
        self._flights.pop(key.digest, None)
        if not task.cancelled() and task.exception() is not None:
            self.usage.failed += 1

    async def _find(self, fields: Fields, key: RequestKey) -> list[Found]:
        results = await self._stored(key)
        if results is None:
            results = await self._ask(fields, key)
        else:
            self.usage.cache_hits += 1
        return to_documents(results, self.name, self._deny)

    async def _stored(self, key: RequestKey) -> list[Result] | None:
        if self._cache is None:
            return None
        body = await asyncio.get_running_loop().run_in_executor(self._cache_thread, self._cache.get, key)
        return None if body is None else self._read(body)

    async def _ask(self, fields: Fields, key: RequestKey) -> list[Result]:
        if self._transport is None:
            raise ReplayMissError(
                f"{self._options.cache_path} has no answer of {self.name} to {key.text}; "
                "run once with the cache mode record"
            )
        body = await self._transport.ask(fields)
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


def _open_cache(options: OnlineOptions) -> ResponseCache | None:
    if options.cache_path is None:
        return None
    replay = options.cache_mode == "replay"
    return ResponseCache(options.cache_path, options.keep_s, options.keep_empty_s, replay=replay)


def _leave(flight: _Flight) -> None:
    """One stops waiting. A question nobody waits for is not worth its money."""
    flight.waiters -= 1
    if not flight.waiters and not flight.task.done():
        flight.task.cancel()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
