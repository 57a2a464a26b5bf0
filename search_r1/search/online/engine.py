"""An online engine as a source of passages: cache, one request for equal queries, deny list, costs.

Every query has its own outcome, and a reply that was paid for is stored even if its client has disconnected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from search_r1.errors import (
    OnlineBusy,
    OnlineError,
    OnlineRejected,
    OnlineReplyError,
    OnlineUnavailable,
    ReplayMissError,
    SearchError,
)
from search_r1.http.client import ApiKey, entered_loop, may_blame_query, read_key
from search_r1.http.response_cache import MemoryCache, RequestKey, ResponseCache, request_key
from search_r1.search.online.deny_list import DenyList, read_deny_file
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.providers import PROVIDERS, Fields, Provider, WebResult, to_documents
from search_r1.search.online.transport import RateLimit, RequestState, Transport, Usage, shown
from search_r1.search.sanitize import whole_characters
from search_r1.search.server.source_interface import (
    EncodedHits,
    Outcome,
    ScoredPassage,
    decode_hits,
    encode_hits,
    version_of,
)
from url_text import without_credentials

_LOG = logging.getLogger(__name__)
_LEAST_RESULTS = 10  # costs the same as fewer; one answer serves every smaller k, also with denied pages left out
_CONTROL_QUERY = "health check"  # every engine takes it
_REFUSED = "query refused by the engine"  # the only key of what the cache has for such a query
_REPLY_S = 0.5  # kept of a client's time, at most, for the reply to reach it


@dataclass
class _PendingRequest:
    """A question that is being answered, and how many wait for it."""

    fields: Fields
    key: RequestKey
    state: RequestState = field(default_factory=RequestState)
    waiters: int = 0
    task: asyncio.Task[EncodedHits] = field(init=False)


class OnlineSource:
    """A `Source`, created by `load_online`; used from one event loop at a time.

    At most `Provider.max_results` documents per query. `usage` counts requests and costs.
    """

    num_passages: int | None = None

    def __init__(self, provider: Provider, options: OnlineOptions, key: ApiKey | None) -> None:
        """Make a source that sends nothing yet; without a `key`, only stored answers are replayed.

        Raises `OnlineError` for an unusable file.
        """
        self.name = provider.name
        self.usage = Usage(price_per_1000=options.price_per_1000)
        self._provider = provider
        self._options = options
        self._key = key
        denied = [*options.deny, *(read_deny_file(options.deny_file) if options.deny_file else ())]
        self._deny = DenyList(denied)
        self._limit = RateLimit(options.per_second or provider.per_second)
        # With another address, field or deny list the same query finds other pages: to clients, that is another index.
        endpoint = without_credentials(options.endpoint or provider.endpoint)
        self.version = version_of(provider.name, endpoint, dict(options.fields), sorted(denied))
        self.batch_size: int | None = max(
            1, int(self._limit.per_second)
        )  # a second's worth: none waits much for others
        # The cache may be a file, whose reads must not block the event loop and come from one thread at a time.
        self._cache = _open_cache(options)
        self._cache_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response-cache")
        self._pending: dict[str, _PendingRequest] = {}
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`. Raises an `OnlineError` if one of the queries has no answer.

        It waits for the other queries first, so that their answers, which were paid for, are stored, and for the
        retries of each: who gets the answers of all queries or none cannot ask again for one of them.
        """
        return decode_hits(await self._outcomes(queries, k, math.inf, with_retries=True))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`. A query without an answer within `wait_s` gets an error that says when to retry.

        A query that is longer than the engine takes is cut; one that the engine refuses for its length or content finds
        nothing, since another query in its place would be answered. A list of queries waits for first attempts only, a
        single query for its retries as well.
        """
        return await self._outcomes(queries, k, wait_s, with_retries=False)

    async def _outcomes(self, queries: list[str], k: int, wait_s: float, with_retries: bool) -> list[Outcome]:
        self._attach()
        wait_s = max(0.0, wait_s - min(_REPLY_S, wait_s / 4))
        num_results = min(max(k, _LEAST_RESULTS), self._provider.max_results)
        plain = [" ".join(whole_characters(query).split()) for query in queries]
        plain = [self._provider.shortened(query) for query in plain]
        self.usage.queries += len(queries)
        with self._pending_requests(
            [query for query in dict.fromkeys(plain) if query], num_results, wait_s
        ) as requests:
            if requests:
                to_the_end = with_retries or len(requests) == 1
                waiting = [one.task if to_the_end else one.state.settled for one in requests.values()]
                await asyncio.wait(waiting, timeout=None if wait_s == math.inf else wait_s)
            outcomes: dict[str, Outcome] = {query: self._outcome(request) for query, request in requests.items()}
        found = [outcomes.get(query, ()) for query in plain]
        return [outcome if isinstance(outcome, SearchError) else outcome[:k] for outcome in found]

    @property
    def per_second(self) -> float:
        """The request rate that is not exceeded."""
        return self._limit.per_second

    async def close(self) -> None:
        """Cancel the running requests, and log the number of requests and their cost."""
        for request in self._pending.values():
            request.task.cancel()
        await asyncio.gather(*(request.task for request in self._pending.values()), return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()
        self._cache_thread.shutdown(wait=True)
        if self._cache is not None:
            self._cache.close()
        _LOG.info("%s: %s", self.name, self.usage)

    def _attach(self) -> None:
        """Take the running event loop as the one this source belongs to."""
        loop = entered_loop(self._loop, "OnlineSource")
        if loop is None:
            return
        self._loop, self._pending = loop, {}
        if self._key is not None:
            self._transport = Transport(self._provider, self._options, self._key, self._limit, self.usage)

    @contextmanager
    def _pending_requests(
        self, queries: list[str], num_results: int, wait_s: float
    ) -> Iterator[dict[str, _PendingRequest]]:
        """The pending request of each query, counted as awaited for at most `wait_s` seconds."""
        requests = {query: self._join(query, num_results, time.monotonic() + wait_s) for query in queries}
        try:
            yield requests
        finally:
            for request in requests.values():
                self._leave(request)

    def _join(self, query: str, num_results: int, until: float) -> _PendingRequest:
        """The pending request for this query, or a new one."""
        fields = self._provider.build(query, num_results) | dict(self._options.fields)
        key = request_key(self.name, fields)
        request = self._pending.get(key.digest)
        if request is None:
            request = self._pending[key.digest] = _PendingRequest(fields, key)
            request.task = asyncio.ensure_future(self._find(request))
            request.task.add_done_callback(lambda task: self._finished(request, task))
        request.waiters += 1
        request.state.until = max(request.state.until, until)
        return request

    def _leave(self, request: _PendingRequest) -> None:
        """A client stops waiting. A request that no client awaits is cancelled, unless it is already paid for."""
        request.waiters -= 1
        if request.waiters:
            return
        request.state.until = -math.inf
        if not request.state.sent and not request.task.done():
            self._pending.pop(request.key.digest, None)  # later clients must not join it
            request.task.cancel()

    def _finished(self, request: _PendingRequest, task: asyncio.Task[EncodedHits]) -> None:
        request.state.settle()
        if self._pending.get(request.key.digest) is request:
            del self._pending[request.key.digest]
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), OnlineBusy):
            self.usage.failed += 1

    def _outcome(self, request: _PendingRequest) -> Outcome:
        """The outcome of a request so far. Raises every exception that is no `SearchError`."""
        if not request.task.done():
            if self._transport is not None and not request.state.sent:
                return self._transport.busy(request.state)
            return OnlineUnavailable(f"{self.name} has not answered yet; its answer will be cached, so ask again")
        if request.task.cancelled():
            return OnlineUnavailable(f"the online engine {self.name} was closed")
        error = request.task.exception()
        if error is None or isinstance(error, SearchError):
            return error or request.task.result()
        raise error

    async def _find(self, request: _PendingRequest) -> EncodedHits:
        results = await self._stored(request.key)
        if results is None:
            results = await self._ask(request)
        else:
            self.usage.cache_hits += 1
        return encode_hits(to_documents(results, self.name, self._deny))

    async def _stored(self, key: RequestKey) -> list[WebResult] | None:
        if self._cache is None:
            return None
        body = await asyncio.get_running_loop().run_in_executor(self._cache_thread, self._cache.get, key)
        return None if body is None else self._read(body)

    async def _ask(self, request: _PendingRequest) -> list[WebResult]:
        key = request.key
        if self._transport is None:
            raise ReplayMissError(
                f"{self._options.cache_path} has no answer from {self.name} to {key.text}; "
                "run once with the cache mode record"
            )
        # The engine may refuse this query for what it is, or all queries, such as for an invalid key. If it takes
        # others, this one has no results, which is kept like an answer; otherwise the client gets the error.
        num_answered = self.usage.answered
        try:
            body = await self._transport.ask(request.fields, request.state)
        except OnlineRejected as error:
            if not may_blame_query(error.status) or not await self._takes_others(num_answered, request.state):
                raise
            self.usage.refused += 1
            _LOG.warning("a query found nothing, because the engine did not take it: %s", error)
            body = json.dumps({_REFUSED: str(error)})
        results = self._read(body)
        # Answers without results are marked, because they are kept for a time of their own.
        if self._cache is not None:
            store = asyncio.get_running_loop().run_in_executor(
                self._cache_thread, self._cache.put, key, body, not results
            )
            await store
        return results

    async def _takes_others(self, num_answered: int, state: RequestState) -> bool:
        """Whether the engine, which refused a query, answered others since it had answered `num_answered`.

        If there were none, a query that no engine refuses is sent, and paid: a key that is not valid any more may have
        the same status as a query that is too long.
        """
        assert self._transport is not None
        if self.usage.answered > num_answered:
            return True
        num_results = min(_LEAST_RESULTS, self._provider.max_results)
        fields = self._provider.build(_CONTROL_QUERY, num_results) | dict(self._options.fields)
        try:
            self._read(await self._transport.ask(fields, state))
        except (OnlineRejected, OnlineReplyError):
            return False
        return True

    def _read(self, body: str) -> list[WebResult]:
        """The results in an answer. Raises `OnlineReplyError` for everything that is none."""
        try:
            answer = json.loads(body, parse_constant=_refuse)
            return [] if isinstance(answer, dict) and _REFUSED in answer else self._provider.parse(answer)
        except (ValueError, RecursionError) as error:
            raise OnlineReplyError(
                f"{self.name} answered, but not with search results ({error}): {shown(body)!r}"
            ) from error


def _open_cache(options: OnlineOptions) -> ResponseCache | MemoryCache | None:
    if options.cache_mode == "memory":
        return MemoryCache(options.keep_s, options.keep_empty_s)
    if options.cache_path is None:
        return None
    replay = options.cache_mode == "replay"
    return ResponseCache(options.cache_path, options.keep_s, options.keep_empty_s, replay=replay)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def load_online(name: str, options: OnlineOptions | None = None) -> OnlineSource:
    """The engine `name` (a key of `PROVIDERS`), ready to search; no request is sent yet.

    Raises `OnlineError` for an unknown name, a wrong setting, a missing API key (`replay` needs none) or a response
    cache that cannot be used.
    """
    options = options or OnlineOptions()
    if name not in PROVIDERS:
        raise OnlineError(f"there is no online engine {name!r}; choose one of {', '.join(PROVIDERS)}")
    provider = PROVIDERS[name]
    options.check()
    _check_fields(provider, options)
    key = None
    if options.cache_mode != "replay":
        key = read_key(provider.key_variable, options.api_key_file)
    return OnlineSource(provider, options, key)


def _check_fields(provider: Provider, options: OnlineOptions) -> None:
    missing = [name for name in provider.needs if not options.fields.get(name)]
    if missing:
        raise OnlineError(f"{provider.name} needs the request field {missing[0]!r}")
    if {"api_key", provider.key_name} & set(options.fields):
        raise OnlineError(f"the API key must not be in the request fields; set {provider.key_variable} instead")
