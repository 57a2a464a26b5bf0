"""Requests to an online engine: rate-limited, with retries, only while a client waits, and counted.

The rate limit is a token bucket with a queue. Why not aiolimiter: a query whose turn would come after its client's
timeout is refused at once, with the time of its turn, and the engine's Retry-After delays all turns. A limiter that can
only be awaited supports neither.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from search_r1.errors import OnlineBusy, OnlineError, OnlineRejected, OnlineReplyError, OnlineUnavailable
from search_r1.http.client import ApiKey, backoff_s, is_loopback, is_temporary, retry_after_s
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.providers import Fields, Provider

_FIRST_GUESS_S = 0.5  # how long a reply takes, before one was seen
_WEIGHT = 0.2  # of the latest reply in the mean


class RateLimit:
    """`per_second` tokens per second; at most one second's worth (at least one token) accumulates. It never sleeps."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second = per_second
        self._interval_s = 1.0 / per_second
        self._saved_s = max(1.0, self._interval_s) - self._interval_s
        self._clock = clock
        self._next = clock() - self._saved_s  # when the token after the last one taken is due

    def due_s(self, num_before: int = 0) -> float:
        """Seconds until a token is due for a request with `num_before` others ahead of it."""
        now = self._clock()
        return max(0.0, max(self._next, now - self._saved_s) + num_before * self._interval_s - now)

    def take(self) -> None:
        """Consume the token that is due."""
        self._next = max(self._next, self._clock() - self._saved_s) + self._interval_s

    def pause(self, seconds: float) -> None:
        """Make no token due for `seconds` from now, as the engine's Retry-After demands."""
        self._next = max(self._next, self._clock() + seconds)


class RequestQueue:
    """First come, first served, at the engine's rate and concurrency. Used from one event loop.

    A cancelled request leaves the queue and costs no token.
    """

    def __init__(self, rate: RateLimit, concurrency: int) -> None:
        self._rate = rate
        self._concurrency = concurrency
        self._line = asyncio.Lock()  # keeps the order of arrival
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting = self._running = 0
        self._answer_s = _FIRST_GUESS_S

    def expected_s(self) -> float:
        """Estimated seconds until a request that arrives now would be sent."""
        rounds_before = (self._waiting + self._running) // self._concurrency
        return max(self._rate.due_s(self._waiting), rounds_before * self._answer_s)

    def paused_s(self) -> float:
        """Seconds until the next request may be sent, as far as the rate limit is concerned."""
        return self._rate.due_s()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it."""
        self._waiting += 1
        try:
            await self._wait()
        finally:
            self._waiting -= 1
        # The slot is held. For how long on average, `expected_s` has to know; a block that raises does not count.
        self._running += 1
        start = time.monotonic()
        try:
            yield
            self._answer_s += _WEIGHT * (time.monotonic() - start - self._answer_s)
        finally:
            self._running -= 1
            self._slots.release()

    async def _wait(self) -> None:
        async with self._line:
            await self._slots.acquire()
            try:
                while (wait_s := self._rate.due_s()) > 0:  # a pause may have come meanwhile
                    await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self._slots.release()
                raise
            self._rate.take()


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_MAX_BODY_BYTES = 16 << 20
_SHOWN_CHARS = 200
_SOON_S = 0.5  # the shortest time after which one whose turn is far away should come again


class _TemporaryFailure(Exception):
    """An attempt failed in a way that a retry may cure; `pause_s` is the value of Retry-After."""

    def __init__(self, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


@dataclass
class RequestState:
    """`until`: the latest deadline of the clients (monotonic seconds); `sent`: the request was sent, and costs money.

    `settled` is done on the reply, or once the first attempt failed: other queries need not wait for its retries.
    """

    until: float = -math.inf
    sent: bool = False
    failure: str = ""
    settled: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


class Transport:
    """Sends requests to one engine, from one event loop. The API key is masked in all that it raises or returns."""

    def __init__(self, provider: Provider, options: OnlineOptions, key: ApiKey, limit: RateLimit, usage: Usage) -> None:
        self._provider = provider
        self._options = options
        self._key = key
        self._limit = limit
        self._usage = usage
        concurrency = options.concurrency or provider.concurrency
        self._queue = RequestQueue(limit, concurrency)
        connector = aiohttp.TCPConnector(limit=concurrency)
        use_proxy = not is_loopback(options.endpoint or provider.endpoint)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=use_proxy)

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, fields: Fields, state: RequestState) -> str:
        """The body of the engine's HTTP 200.

        Raises `OnlineBusy` (its turn would come after its clients' deadline), `OnlineUnavailable` (no answer within the
        deadline or the attempts allowed), `OnlineRejected` or `OnlineReplyError` (a body that is too large).
        """
        deadline = math.inf  # known when the first attempt begins
        for attempt in range(1, self._options.max_attempts + 1):
            self._check_turn(state, deadline)
            async with self._queue.slot():
                # The turn came late, or the clients have left: an answer would cost money, and nobody would see it.
                if time.monotonic() >= state.until:
                    raise self.busy(state)
                deadline = min(deadline, time.monotonic() + self._options.deadline_s)
                try:
                    return await self._attempt(fields, state, deadline)
                except _TemporaryFailure as failure:
                    pause_s = max(failure.pause_s, backoff_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
                    last = attempt == self._options.max_attempts or pause_s >= deadline - time.monotonic()
                    if last:
                        raise self._unavailable(f"{attempt} attempts; last: {failure}") from None
            # The pause is outside the slot, which another request can use meanwhile.
            await asyncio.sleep(pause_s)
        raise AssertionError("max_attempts is at least 1")

    def busy(self, state: RequestState) -> OnlineBusy:
        """The error for a query that is still waiting, and when to retry: when its turn is near enough to wait for."""
        wait_s, left_s = self._queue.expected_s(), max(0.0, state.until - time.monotonic())
        turn = f"in about {wait_s:.1f} s, at {self._limit.per_second:g} requests per second"
        cause = f"got no request: this query could be sent {turn}, which is after its client's timeout"
        if state.failure:
            cause = f"gave no answer within its client's timeout; last: {state.failure}"
        message = f"the online engine {self._provider.name} {cause}"
        return OnlineBusy(message, retry_after_s=max(_SOON_S, wait_s - left_s / 2))

    def _check_turn(self, state: RequestState, deadline: float) -> None:
        """Raise `OnlineUnavailable` for a request whose turn would come too late."""
        now, wait_s = time.monotonic(), self._queue.expected_s()
        if now + self._queue.paused_s() >= min(deadline, now + self._options.deadline_s):
            raise self._unavailable("its rate limit leaves no room before the deadline")
        if now + wait_s >= state.until:
            raise self.busy(state)

    async def _attempt(self, fields: Fields, state: RequestState, deadline: float) -> str:
        state.sent = True
        self._usage.attempts += 1
        try:
            return await self._send(fields, min(self._options.timeout_s, deadline - time.monotonic()))
        except _TemporaryFailure as failure:
            state.sent, state.failure = False, str(failure)
            state.settle()
            raise

    async def _send(self, fields: Fields, timeout_s: float) -> str:
        """One HTTP request. Raises `_TemporaryFailure` for what may pass, else an `OnlineError`."""
        try:
            async with self._request(fields, timeout_s) as response:
                text = await self._text(response)
        # In this order: some timeouts of aiohttp, and its invalid addresses, are ClientErrors as well.
        except TimeoutError:
            raise _TemporaryFailure(f"no answer to one request in {timeout_s:.1f} s") from None
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise OnlineError(self._key.mask(f"{self._provider.name} cannot be reached: {error}")) from None
        except aiohttp.ClientError as error:
            raise _TemporaryFailure(self._key.mask(f"{type(error).__name__}: {error}")) from None
        self._check_status(response, text)
        self._usage.answered += 1
        return text

    def _request(self, fields: Fields, timeout_s: float) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        provider = self._provider
        # Each engine has its own place for the key and the fields. A redirect is not followed: it may be to an address
        # that must not see the key.
        credential = {provider.key_name: provider.key_prefix + self._key.reveal()}
        in_body = provider.method == "POST"
        in_url = ({} if in_body else fields) | (credential if provider.key_place == "parameter" else {})
        return self._session.request(
            provider.method,
            self._options.endpoint or provider.endpoint,
            params=_parameters(in_url),
            headers={"Accept": "application/json"} | (credential if provider.key_place == "header" else {}),
            json=fields if in_body else None,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        )

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                response.close()
                raise OnlineReplyError(f"{self._provider.name} sent more than {_MAX_BODY_BYTES} bytes")
        return self._key.mask(body.decode("utf-8", "replace"))

    def _check_status(self, response: aiohttp.ClientResponse, text: str) -> None:
        status = response.status
        if status == 200:
            return
        message = f"HTTP {status}: {shown(text)}"
        # A retry would be refused again. The status goes with the error: it tells whether the query may be to blame.
        if not is_temporary(status):
            rejected = OnlineRejected(f"{self._provider.name} refused the request with {message}")
            rejected.status = status
            raise rejected
        pause_s = retry_after_s(response.headers.get("Retry-After"))
        if status == 429:
            self._limit.pause(pause_s)  # the rate limit is that of the account
        raise _TemporaryFailure(message, pause_s)

    def _unavailable(self, reason: str) -> OnlineUnavailable:
        return OnlineUnavailable(f"the online engine {self._provider.name} gave no answer ({reason}); try again later")


def _parameters(fields: Fields) -> list[tuple[str, str]]:
    """The fields as the query of a URL has them: a list is a parameter that is repeated."""
    pairs = []
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            text = "" if one is None else json.dumps(one)
            pairs.append((name, one if isinstance(one, str) else text))
    return pairs


def shown(text: str) -> str:
    """The start of `text`, on one line, for an error message."""
    return " ".join(text[:_SHOWN_CHARS].split()) or "no message"


@dataclass
class Usage:
    """The number of requests since the start, and what they cost.

    The engine charges for `answered`, its HTTP 200 replies. `refused` counts the queries that it did not take for their
    length or content.
    """

    queries: int = 0
    cache_hits: int = 0
    attempts: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    price_per_1000: float = 0.0

    @property
    def cost(self) -> float:
        """Money spent, in the currency of the price."""
        return self.answered * self.price_per_1000 / 1000

    def __str__(self) -> str:
        return (
            f"{self.queries} queries, {self.cache_hits} from the cache, {self.attempts} attempts, "
            f"{self.answered} answered, {self.failed} failed, {self.refused} refused, cost {self.cost:.4f}"
        )
