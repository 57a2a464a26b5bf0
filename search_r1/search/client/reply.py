"""How the client parses HTTP replies. Anything that is not a retrieval reply is an error, never an empty result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from search_r1.errors import RetrieverReplyError
from search_r1.http.address import without_credentials
from search_r1.http.error_replies import SHOWN_CHARS
from search_r1.search.sanitize import whole_characters

Passages = list[dict[str, Any]]


@dataclass(frozen=True)
class QueryFailure:
    """Why one query of several has no passages: the status and message that a request for it alone would have had."""

    status: int
    detail: str
    retry_after_s: float = 0.0


def parse_reply(payload: bytes, num_queries: int, url: str) -> list[Passages | QueryFailure]:
    """The passages of each query, or why it has none. Raises `RetrieverReplyError`.

    Accepts `{"document": {...}, "score": x}`, a document that is a string (the published reranking server), and bare
    documents. Each passage has `contents`; a missing `id` or `score` becomes None, and half a character U+FFFD.
    """
    try:
        reply = whole_characters(json.loads(payload))
        result, errors = reply["result"], reply.get("errors") or {}
        if len(result) != num_queries:
            raise ValueError(f"{len(result)} results for {num_queries} queries")
        # Our own server reports a query that failed beside the results of the others.
        outcomes: list[Passages | QueryFailure] = []
        for number, items in enumerate(result):
            if str(number) in errors:
                outcomes.append(_failure(errors[str(number)]))
                continue
            if not isinstance(items, list):
                raise TypeError(f"the result of a query is a {type(items).__name__}, not a list")
            outcomes.append([_passage(item) for item in items])
        return outcomes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = payload[:SHOWN_CHARS].decode("utf-8", "replace")
        raise RetrieverReplyError(
            f"{url} answered 200 but not with a retrieval reply ({type(error).__name__}: {error}): {shown!r}; "
            "check that retriever.url is the /retrieve route of a retrieval server"
        ) from error


def _failure(error: Any) -> QueryFailure:
    detail = without_credentials(str(error["detail"])[:SHOWN_CHARS])
    return QueryFailure(int(error["status"]), detail, max(0.0, float(error.get("retry_after_s", 0.0))))


def _passage(item: Any) -> dict[str, Any]:
    document = item.get("document", item) if isinstance(item, dict) else item
    passage = {"contents": document} if isinstance(document, str) else dict(document)
    if not isinstance(passage.get("contents"), str):
        raise TypeError("a document without 'contents'")
    score = item.get("score") if isinstance(item, dict) else None
    return passage | {"id": passage.get("id"), "score": score}
