"""Requests to an online engine: its rate, its limit of concurrent requests, retries of what may pass, one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from search_r1.search.backoff import backoff_s
from search_r1.search.errors import OnlineError, OnlineRejected, OnlineReplyError, OnlineUnavailable
from search_r1.search.online.api_key import ApiKey
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.provider import Fields, Provider
from search_r1.search.online.rate_limit import RateLimit
from search_r1.search.online.usage import Usage
from search_r1.search.reply import retry_after_s

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_MAX_BODY_BYTES = 16 << 20
_SHOWN_CHARS = 200


class _Trouble(Exception):
    """An attempt failed in a way that may pass; `pause_s` is what Retry-After asked for."""

    def __init__(self, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


class Transport:
    """Asks one engine, from one event loop. Whatever it raises or returns has the API key masked."""

    def __init__(self, provider: Provider, options: OnlineOptions, key: ApiKey, limit: RateLimit, usage: Usage) -> None:
        self._provider = provider
        self._options = options
        self._key = key
        self._limit = limit
        self._usage = usage
        concurrency = options.concurrency or provider.concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._client = httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency))

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, fields: Fields) -> str:
        """The body of the engine's HTTP 200.

        Raises `OnlineUnavailable` (no answer within the deadline or the attempts allowed), `OnlineRejected` or
        `OnlineReplyError` (a body without end).
        """
        deadline = time.monotonic() + self._options.deadline_s
        for attempt in range(1, self._options.max_attempts + 1):
            try:
                return await self._attempt(fields, deadline)
            except _Trouble as trouble:
                pause_s = max(trouble.pause_s, backoff_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
                last = attempt == self._options.max_attempts or pause_s >= deadline - time.monotonic()
                if last:
                    raise self._unavailable(f"{attempt} attempts; last: {trouble}") from None
            await asyncio.sleep(pause_s)
        raise AssertionError("max_attempts is at least 1")

    async def _attempt(self, fields: Fields, deadline: float) -> str:
        async with self._slot(deadline):
            wait_s = self._limit.reserve(deadline - time.monotonic())
            if wait_s is None:
                raise self._unavailable("its rate limit leaves no room before the deadline")
            await asyncio.sleep(wait_s)
            self._usage.attempts += 1
            return await self._send(fields, min(self._options.timeout_s, deadline - time.monotonic()))

    @asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._slots.acquire()
        except TimeoutError:
            raise self._unavailable("earlier requests took all the time there was") from None
        try:
            yield
        finally:
            self._slots.release()

    async def _send(self, fields: Fields, timeout_s: float) -> str:
        """One HTTP request. Raises `_Trouble` for what may pass, else an `OnlineError`."""
        try:
            # httpx bounds each read; a server that sends a byte now and then needs a bound on the whole
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(self._request(fields, timeout_s), stream=True)
                text = await self._text(response)
        except TimeoutError:
            raise _Trouble(f"no answer to one request in {timeout_s:.1f} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Trouble(self._key.mask(f"{type(error).__name__}: {error}")) from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise OnlineError(self._key.mask(f"{self._provider.name} cannot be asked: {error}")) from None
        self._check_status(response, text)
        self._usage.answered += 1
        return text

    def _request(self, fields: Fields, timeout_s: float) -> httpx.Request:
        provider = self._provider
        credential = {provider.key_name: provider.key_prefix + self._key.reveal()}
        headers = {"Accept": "application/json"} | (credential if provider.key_place == "header" else {})
        url = httpx.URL(self._options.endpoint or provider.endpoint)
        in_url = credential if provider.key_place == "parameter" else {}
        body = fields if provider.method == "POST" else None
        url = url.copy_merge_params(in_url if provider.method == "POST" else fields | in_url)
        return self._client.build_request(provider.method, url, headers=headers, json=body, timeout=timeout_s)

    async def _text(self, response: httpx.Response) -> str:
        body = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise OnlineReplyError(f"{self._provider.name} sent more than {_MAX_BODY_BYTES} bytes")
        finally:
            await response.aclose()
        return self._key.mask(body.decode("utf-8", "replace"))

    def _check_status(self, response: httpx.Response, text: str) -> None:
        status = response.status_code
        if status == 200:
            return
        message = f"HTTP {status}: {shown(text)}"
        if status != 429 and status < 500:
            raise OnlineRejected(f"{self._provider.name} refused the request with {message}")
        pause_s = retry_after_s(response.headers.get("Retry-After"))
        if status == 429:
            self._limit.pause(pause_s)  # the others would be refused as well
        raise _Trouble(message, pause_s)

    def _unavailable(self, reason: str) -> OnlineUnavailable:
        return OnlineUnavailable(f"the online engine {self._provider.name} gave no answer ({reason}); try again later")


def shown(text: str) -> str:
    """The start of `text` on one line, for an error message."""
    return " ".join(text[:_SHOWN_CHARS].split()) or "no message"
