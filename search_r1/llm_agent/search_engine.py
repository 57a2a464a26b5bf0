"""What answers a query: the retrieval service, or any object with `search(query)`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverError
from verl.by_name import load_by_name
from verl.config import RetrieverConfig
from verl.errors import ConfigError, EnvironmentUnavailable

Document = Mapping[str, Any] | str


class SearchEngine(Protocol):
    """The best documents for a query, best first.

    Documents are mappings with `contents` (a title line, then text), or with `text` and maybe `title`, or plain texts.
    `search` may be a coroutine; a plain method runs in a thread, several at once.
    """

    def search(self, query: str) -> Any: ...


class Searcher:
    """One engine behind one face: at most `topk` mappings with `contents`; any failure is `EnvironmentUnavailable`.

    An engine may also have `check()` and `close()`, plain or coroutines.
    """

    def __init__(self, engine: SearchEngine, topk: int) -> None:
        if not callable(getattr(engine, "search", None)):
            raise ConfigError(f"{type(engine).__name__} is no search engine: it has no method search(query)")
        self._engine, self._topk = engine, topk

    @classmethod
    def from_config(cls, retriever: RetrieverConfig) -> Searcher:
        """The engine class that `retriever.engine` names, made without arguments; without one, the service at `url`."""
        if retriever.engine is not None:
            return cls(load_by_name(retriever.engine, "retriever.engine")(), retriever.topk)
        client = RetrievalClient(
            retriever.url,
            topk=retriever.topk,
            timeout_s=retriever.timeout_s,
            deadline_s=retriever.deadline_s,
            max_batch=retriever.max_batch,
        )
        return cls(client, retriever.topk)

    async def search(self, query: str) -> list[Mapping[str, Any]]:
        found = await self._call("search", query)
        if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
            raise self._unavailable(f"search() gave a {type(found).__name__}, not a list of documents")
        return [self._document(document) for document in found[: self._topk]]

    async def check(self) -> None:
        if hasattr(self._engine, "check"):
            await self._call("check")

    async def close(self) -> None:
        if hasattr(self._engine, "close"):
            await self._call("close")

    async def _call(self, name: str, *arguments: str) -> Any:
        method = getattr(self._engine, name)
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments)
            result = await asyncio.to_thread(method, *arguments)
            return await result if inspect.isawaitable(result) else result
        except RetrieverError as error:
            raise EnvironmentUnavailable(str(error)) from error
        except Exception as error:  # whatever an engine of someone else's raises is no fault of the policy
            raise self._unavailable(f"{name}() raised {type(error).__name__}: {error}") from error

    def _document(self, document: Document) -> Mapping[str, Any]:
        if isinstance(document, str):
            return {"contents": f"\n{document}"}
        if isinstance(document, Mapping) and isinstance(document.get("contents"), str):
            return document
        if isinstance(document, Mapping) and isinstance(document.get("text"), str):
            return {**document, "contents": f"{document.get('title', '')}\n{document['text']}"}
        raise self._unavailable(f"a document is {document!r}, not a text or a mapping with 'contents' or 'text'")

    def _unavailable(self, reason: str) -> EnvironmentUnavailable:
        return EnvironmentUnavailable(f"search engine {type(self._engine).__name__}: {reason}")
