"""What answers a query: the retrieval service, or any object with `search(query)`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from search_r1.errors import QueryRefused, RetrieverError
from search_r1.http.client import is_http_address, may_blame_query
from search_r1.search.client import RetrievalClient
from search_r1.search.sanitize import title_of, whole_characters
from verl.config import RetrieverConfig
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.process.by_name import load_by_name
from verl.process.secrets import mask_secrets

INDEX_VERSION = "index_version"
_INFO_DEADLINE_S = 5.0

Document = Mapping[str, Any] | str
_LOG = logging.getLogger(__name__)
_CONTROL_QUERY = "health check"  # that of the client's check: an engine that takes no such query takes none
_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class SearchEngine(Protocol):
    """The best documents for a query, best first.

    Documents are mappings with `contents` (a title line, then text), or with `text` and optionally `title` (a string or
    a number), or plain strings. `search` may be a coroutine; a plain method runs in threads, at most
    `retriever.max_concurrent` at once.
    """

    def search(self, query: str) -> Any: ...


class Searcher:
    """Wraps any engine: at most `topk` mappings with `contents`; any failure is `EnvironmentUnavailable`.

    A query that the engine refuses for its length or content finds nothing, for it is the policy's doing. That is
    `QueryRefused`, or an exception with an HTTP status that may blame the query (`status`, `status_code`, `code`, also
    of its `response`) if the engine takes another query.

    An engine may also have `check()` and `close()`, plain or coroutines.
    """

    def __init__(
        self, engine: SearchEngine, topk: int, deadline_s: float | None = None, max_concurrent: int = 16
    ) -> None:
        """`deadline_s` bounds a search, including the wait for a thread; None: the engine has its own deadline."""
        if not callable(getattr(engine, "search", None)):
            raise ConfigError(f"{_name(engine)} is no search engine: it has no method search(query)")
        self._engine, self._topk, self._deadline_s = engine, topk, deadline_s
        self._threads = DaemonThreads(max_concurrent)
        self._num_answered = self._num_refused = 0

    @classmethod
    def from_config(cls, retriever: RetrieverConfig) -> Searcher:
        """The engine that `retriever.engine` names; without one, the service at `url`. Raises `ConfigError`."""
        if retriever.engine is not None:
            engine = _make_engine(retriever.engine, retriever.engine_kwargs)
            return cls(engine, retriever.topk, retriever.deadline_s, retriever.max_concurrent)
        client = RetrievalClient(
            retriever.url,
            topk=retriever.topk,
            timeout_s=retriever.timeout_s,
            deadline_s=retriever.deadline_s,
            max_batch=retriever.max_batch,
        )
        return cls(client, retriever.topk)

    async def search(self, query: str) -> list[Mapping[str, Any]]:
        # If other queries are answered while this one fails, the engine works, and this query is to blame.
        num_answered = self._num_answered
        try:
            found = await self._call("search", query)
        except EnvironmentUnavailable as error:
            # A query that is refused by itself finds nothing; any other failure is the engine's.
            if not await self._blames_query(error.__cause__, num_answered):
                raise
            self._count_refusal(query, error)
            return []
        self._num_answered += 1
        if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
            raise self._unavailable(
                f"search() gave a {type(found).__name__} ({_short(found)}), not a list of documents"
            )
        return [self._document(document) for document in found[: self._topk]]

    async def check(self) -> None:
        if hasattr(self._engine, "check"):
            await self._call("check")

    async def close(self) -> None:
        if self._num_refused:
            _LOG.warning("search engine %s refused %d queries", _name(self._engine), self._num_refused)
        if hasattr(self._engine, "close"):
            await self._call("close")

    async def _blames_query(self, cause: BaseException | None, num_answered: int) -> bool:
        """Whether the engine refused one query, but takes others: it has answered more than `num_answered` by now, or
        it answers one that is sent to find out."""
        if isinstance(cause, QueryRefused):
            return True
        if not may_blame_query(_http_status(cause)):
            return False
        if self._num_answered > num_answered:
            return True
        try:
            await self._call("search", _CONTROL_QUERY)
        except EnvironmentUnavailable:
            return False
        return True

    def _count_refusal(self, query: str, error: Exception) -> None:
        self._num_refused += 1
        if self._num_refused == 1:
            _LOG.warning(
                "a query of %d characters was refused, so it finds nothing (later ones are counted): %s",
                *(len(query), error),
            )

    async def _call(self, name: str, *arguments: str) -> Any:
        # A coroutine runs here, a plain method in a thread; either may take as long as the deadline.
        method = getattr(self._engine, name)
        timer = asyncio.timeout(self._deadline_s)
        try:
            async with timer:
                if inspect.iscoroutinefunction(method):
                    return await method(*arguments)
                result = await asyncio.wrap_future(self._threads.submit(method, *arguments))
                return await result if inspect.isawaitable(result) else result
        except RetrieverError as error:
            raise EnvironmentUnavailable(whole_characters(str(error))) from error
        except TimeoutError as error:
            if not timer.expired():
                raise self._unavailable(f"{name}() raised TimeoutError: {error}") from error
            raise self._unavailable(
                f"{name}() gave no answer in {self._deadline_s:g} s (retriever.deadline_s)"
            ) from error
        except Exception as error:  # whatever an engine of someone else's raises is no fault of the policy
            raise self._unavailable(f"{name}() raised {type(error).__name__}: {error}") from error

    def _document(self, document: Document) -> Mapping[str, Any]:
        if isinstance(document, str):
            return {"contents": f"\n{whole_characters(document)}"}
        if isinstance(document, Mapping):
            document = whole_characters(dict(document))
        if isinstance(document, Mapping) and isinstance(document.get("contents"), str):
            return document
        if isinstance(document, Mapping) and isinstance(document.get("text"), str):
            return {**document, "contents": f"{title_of(document.get('title')) or ''}\n{document['text']}"}
        raise self._unavailable(f"a document is {_short(document)}, not a text or a mapping with 'contents' or 'text'")

    def _unavailable(self, reason: str) -> EnvironmentUnavailable:
        return EnvironmentUnavailable(whole_characters(f"search engine {_name(self._engine)}: {reason}"))


class _Function:
    """A function of a query as an engine."""

    def __init__(self, search: Any, name: str) -> None:
        self.search, self.name = search, name


async def retriever_info(url: str) -> dict[str, Any] | None:
    """The JSON object from `/info`, or else `/healthz`, of the service at `url`; None if it has neither."""
    if not is_http_address(url):
        return None
    parts = urlsplit(url)
    # The client refuses a header with a token beside credentials in the address.
    token = os.environ.get("RETRIEVAL_AUTH_TOKEN", "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token and parts.username is None else {}
    timeout = aiohttp.ClientTimeout(total=_INFO_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for path in ("/info", "/healthz"):
            try:
                async with session.get(f"{parts.scheme}://{parts.netloc}{path}") as response:
                    found = json.loads(await response.text()) if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            if isinstance(found, dict):
                return found
    return None


def index_named(info: Mapping[str, Any] | None) -> str | None:
    """The index of which a service reports `info`, in words; None if it does not say."""
    if info is None or INDEX_VERSION not in info:
        return None
    return f"version {info[INDEX_VERSION]} ({info.get('retriever')}, {info.get('corpus_size')} passages)"


def _make_engine(name: str, arguments: Mapping[str, Any]) -> SearchEngine:
    found = load_by_name(name, "retriever.engine")
    if not isinstance(found, type):
        # partial: a coroutine function stays one
        return _Function(functools.partial(found, **arguments), name.rpartition(".")[2])
    try:
        return found(**arguments)  # type: ignore[no-any-return]
    except Exception as error:  # of somebody else's class
        raise ConfigError(
            f"retriever.engine={name} cannot be made with retriever.engine_kwargs={mask_secrets(arguments)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _name(engine: Any) -> str:
    return engine.name if isinstance(engine, _Function) else type(engine).__name__


def _http_status(error: BaseException | None) -> int:
    """The status in an HTTP library's exception (aiohttp, httpx, requests, urllib) or in ours; 0 if it has none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int):
                return status
    return 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# Threads for third-party functions, which may hang.


class DaemonThreads:
    """A pool of up to `number` threads, started on demand. Unlike an executor's, they never delay the process's end."""

    def __init__(self, number: int) -> None:
        self._number, self._started = number, 0
        self._waiting: SimpleQueue[_Work] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run `function` when a thread is free; if its future is cancelled before that, it never runs."""
        future: Future[Any] = Future()
        self._waiting.put((future, function, arguments))
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._started < self._number:
                self._started += 1
                threading.Thread(target=self._work, name="search-engine", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, function, arguments = self._waiting.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:  # it belongs to the one who waits
                    future.set_exception(error)
            self._idle.release()
