"""Brave Search. https://api.search.brave.com/res/v1/web/search"""

from __future__ import annotations

import html
from typing import Any

from search_r1.search.online.provider import Fields, Provider, Result, object_of, read_results, text_of


def build(query: str, num_results: int) -> Fields:
    """The URL parameters of one search: plain text without marks around the matching words.

    With the field `extra_snippets`, which not every plan has, a result has up to five more passages.
    """
    return {"q": query, "count": num_results, "text_decorations": "false"}


def parse(answer: Any) -> list[Result]:
    """The web results; an answer of the type "search" without any found nothing. Raises `ValueError`."""
    answer = object_of(answer)
    web = answer.get("web")
    if web is None and answer.get("type") == "search":
        return []
    found = read_results(object_of(web).get("results"), "url", _text)
    return [Result(html.unescape(result.title), result.url, html.unescape(result.text)) for result in found]


def _text(item: Fields) -> str:
    more = item.get("extra_snippets") or []
    if not isinstance(more, list) or not all(isinstance(snippet, str) for snippet in more):
        raise ValueError("'extra_snippets' of a result is not a list of strings")
    return "\n".join([text_of(item, "description"), *more])


BRAVE = Provider(
    name="brave",
    endpoint="https://api.search.brave.com/res/v1/web/search",
    method="GET",
    build=build,
    parse=parse,
    max_results=20,
    key_variable="BRAVE_API_KEY",
    key_place="header",
    key_name="X-Subscription-Token",
    per_second=1.0,
)
