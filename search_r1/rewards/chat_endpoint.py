"""A model behind an OpenAI-compatible chat endpoint: one message, one reply, with retries and a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from search_r1.errors import OnlineError
from search_r1.http.client import (
    ApiKey,
    backoff_s,
    is_http_address,
    is_loopback,
    is_temporary,
    may_blame_query,
    retry_after_s,
    server_message,
)
from verl.errors import ConfigError, RewardUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_TIMEOUT = aiohttp.ClientTimeout()

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_SHOWN_CHARS = 200
_WITHOUT_FORMAT = frozenset({400, 413, 422, 500, 501})  # said to a response_format that a server cannot serve
FORBIDDEN = 403  # to this key, or by gateways: this text
ADVICE = {
    401: "check the key in the environment variable that api_key_env names",
    402: "the account of this key has no credit left",
    FORBIDDEN: "check the key in the environment variable that api_key_env names, and what it may use",
    404: "check that url is the base of the API (http://host:port/v1) and that it serves this model",
}

_NO_KEY = (
    "no key was sent: name the environment variable that holds it by api_key_env (evaluation: --judge_api_key_env)"
)


class _WithStatus(Exception):
    """`status` is that of the HTTP answer, 0 without one."""

    def __init__(self, cause: str, status: int = 0, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.status = status
        self.pause_s = pause_s


class RequestRefused(_WithStatus):
    """The endpoint refused this request, for its content, its length, or as it would any other: another one tells."""


class EndpointDown(RewardUnavailable):
    """The endpoint did not reply at all."""


class _Trouble(_WithStatus):
    """An attempt failed in a way that a retry may cure; `pause_s` is the value of Retry-After."""


class _Rubbish(Exception):
    """A reply that cannot be used."""


@dataclass(frozen=True)
class ChatOptions:
    """`url` is the base of the API, such as http://127.0.0.1:8001/v1; `api_key_env` names an environment variable.

    `timeout_s` bounds one request, `deadline_s` a question with its `retries`. `extra_body` is merged over the request
    body; a key that is null there is removed. Raises `ValueError`.
    """

    url: str
    model: str
    api_key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 60.0
    deadline_s: float = 180.0
    retries: int = 3
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", self.url) or not is_http_address(self.url):
            raise ValueError("url must look like http://host:port/v1, without user, password or parameters")
        if not self.model:
            raise ValueError("model is empty: give the name under which the endpoint serves it")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            raise ValueError("api_key_env must be the name of an environment variable, not the key itself")
        if self.timeout_s <= 0 or self.deadline_s <= 0 or self.max_tokens < 1 or self.retries < 0:
            raise ValueError("timeout_s, deadline_s and max_tokens must be above 0, retries at least 0")


class ChatEndpoint:
    """Sends requests to the model, and remembers what the endpoint supports. It never raises or logs the API key."""

    def __init__(self, options: ChatOptions, reply_format: Mapping[str, Any]) -> None:
        """`reply_format` is sent as `response_format` as long as the endpoint accepts it. Raises `ConfigError`."""
        self.options = options
        self._key = _api_key(options.api_key_env)
        self._reply_format = {"response_format": reply_format}
        # None: not known yet
        self._takes_format: bool | None = False if "response_format" in options.extra_body else None

    def client(self, concurrency: int) -> aiohttp.ClientSession:
        """An HTTP client for the running event loop; `ask` sets the timeouts."""
        headers = {"Authorization": f"Bearer {self._key.reveal()}"} if self._key else {}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=concurrency),
            headers=headers,
            timeout=_NO_TIMEOUT,
            trust_env=not is_loopback(self.options.url),
        )

    def body(self, message: str) -> dict[str, Any]:
        """The request body for `message`, without the reply format."""
        options = self.options
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        return {key: value for key, value in (body | dict(options.extra_body)).items() if value is not None}

    async def ask(self, client: aiohttp.ClientSession, body: dict[str, Any], read: Callable[[str], T]) -> tuple[str, T]:
        """The first reply that `read` accepts, and what it returned. `read` raises `ValueError` for an invalid reply.

        Raises `RewardUnavailable` if there is none after the retries or by the deadline, `RequestRefused` or
        `ConfigError` if a retry would not help.
        """
        start = time.monotonic()
        last: Exception = TimeoutError()
        for attempt in range(1, self.options.retries + 2):
            pause_s = 0.0
            try:
                reply = await self._reply(client, body, min(self.options.timeout_s, self._left_s(start)))
                return reply, _read(read, reply)
            except _Rubbish as rubbish:
                last = rubbish
            except _Trouble as trouble:
                last = trouble
                pause_s = max(trouble.pause_s, backoff_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            # A reply that cannot be used is asked for again at once; a server in trouble gets a pause.
            if attempt > self.options.retries or pause_s >= self._left_s(start):
                break
            await asyncio.sleep(pause_s)
        spent = f"{attempt} requests in {time.monotonic() - start:.1f} s"
        kind = EndpointDown if isinstance(last, _Trouble) else RewardUnavailable
        raise kind(f"the judge {self._who} gave no verdict ({spent}; last: {last})")

    def _left_s(self, start: float) -> float:
        return start + self.options.deadline_s - time.monotonic()

    async def _reply(self, client: aiohttp.ClientSession, body: dict[str, Any], timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._post_with_format(client, body)
        except TimeoutError:
            raise _Trouble(f"no answer to one request in {timeout_s:.1f} s") from None

    async def _post_with_format(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        """Post with the reply format, unless the endpoint refused it before it ever answered with it; then without."""
        if self._takes_format is False:
            return await self._post(client, body)
        try:
            reply = await self._post(client, body | self._reply_format)
        except (RequestRefused, _Trouble) as error:
            # An endpoint that has taken the format before means something else by its error.
            if self._takes_format or error.status not in _WITHOUT_FORMAT:
                raise
            # If this fails, too, the format need not be the reason, and the next request tries it again.
            reply = await self._post(client, body)
            log.info("the judge %s takes no response_format: asked without", self._who)
            self._takes_format = False
            return reply
        self._takes_format = True
        return reply

    async def _post(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        url = f"{self.options.url.rstrip('/')}/chat/completions"
        try:
            async with client.post(url, json=body, allow_redirects=False) as response:
                text = self._masked((await response.read()).decode("utf-8", "replace"))
        except aiohttp.ClientError as error:
            raise _Trouble(self._masked(f"{type(error).__name__}: {error}")) from None
        self._check_status(response, text)
        return _content(text)

    def _check_status(self, response: aiohttp.ClientResponse, text: str) -> None:
        status = response.status
        if status == 200:
            return
        said = f"HTTP {status}: {server_message(text.encode())}"
        if may_blame_query(status) or status == FORBIDDEN:
            raise RequestRefused(f"the judge {self._who} refused a request with {said}", status)
        if is_temporary(status) or status in _WITHOUT_FORMAT:
            raise _Trouble(said, status, retry_after_s(response.headers.get("Retry-After")))
        advice = _NO_KEY if status == 401 and self._key is None else ADVICE.get(status, "check url")
        raise ConfigError(f"the judge {self._who} refused with {said}; {advice}")

    @property
    def _who(self) -> str:
        return f"{self.options.model} at {self.options.url}"

    def _masked(self, text: str) -> str:
        return self._key.mask(text) if self._key else text


def _content(text: str) -> str:
    """The text of the first choice. Raises `_Rubbish` for anything else, and for a text that was cut."""
    try:
        choice = json.loads(text)["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _Rubbish(f"no chat completion ({type(error).__name__}: {error}): {text[:_SHOWN_CHARS]!r}") from None
    if not isinstance(content, str):
        raise _Rubbish(f"a reply without text: {text[:_SHOWN_CHARS]!r}")
    if finish == "length":
        raise _Rubbish(f"the reply was cut at max_tokens: {content[:_SHOWN_CHARS]!r}")
    return content


def _read(read: Callable[[str], T], reply: str) -> T:
    try:
        return read(reply)
    except ValueError as error:
        raise _Rubbish(str(error)) from None


def _api_key(variable: str | None) -> ApiKey | None:
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"no API key of the judge: set {variable} in the environment, or api_key_env=null")
    try:
        return ApiKey(os.environ[variable], f"the variable {variable}")
    except OnlineError as error:
        raise ConfigError(str(error)) from None
