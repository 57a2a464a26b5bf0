"""The online engines: how each takes a query, and how its reply is read. Both are pure functions."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Fields = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One web result. `score` is the engine's own (higher is better), None when it gives only an order."""

    title: str
    url: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class Provider:
    """One engine.

    `build(query, num_results)` gives the fields of a request without its API key: URL parameters of a GET, the JSON
    body of a POST. `parse(answer)` reads the decoded JSON of an HTTP 200, best first, and raises `ValueError` when it
    does not have the documented shape. `per_second` and `concurrency` are what a small plan allows.
    """

    name: str
    endpoint: str
    method: Literal["GET", "POST"]
    build: Callable[[str, int], Fields]
    parse: Callable[[Any], list[Result]]
    max_results: int
    key_variable: str
    key_place: Literal["header", "parameter"]
    key_name: str
    key_prefix: str = ""
    needs: tuple[str, ...] = ()
    per_second: float = 1.0
    concurrency: int = 8


def read_results(items: Any, url: str, text: Callable[[Fields], str], score: str | None = None) -> list[Result]:
    """The results in a list of objects; `url` and `score` name their keys. One without an address is left out.

    Raises `ValueError` for anything but a list of objects with text in their fields.
    """
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the results are not a list of objects")
    return [
        Result(text_of(item, "title"), text_of(item, url), text(item), _number(item.get(score)))
        for item in items
        if text_of(item, url)
    ]


def text_of(item: Fields, name: str) -> str:
    """A text field; "" when it is absent or null. Raises `ValueError` when it is something else."""
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name!r} of a result is a {type(value).__name__}, not a string")
    return value or ""


def object_of(answer: Any) -> Fields:
    """`answer`, when it is a JSON object. Raises `ValueError`."""
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is a {type(answer).__name__}, not an object")
    return answer


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


# Serper: Google results. https://google.serper.dev/search


def _build_serper(query: str, num_results: int) -> Fields:
    """The JSON body of one search."""
    return {"q": query, "num": num_results}


def _parse_serper(answer: Any) -> list[Result]:
    """The organic results. Raises `ValueError` when there is no `organic` list."""
    answer = object_of(answer)
    if "organic" not in answer:
        raise ValueError("there is no 'organic'")
    return read_results(answer["organic"], "link", lambda item: text_of(item, "snippet"))


SERPER = Provider(
    name="serper",
    endpoint="https://google.serper.dev/search",
    method="POST",
    build=_build_serper,
    parse=_parse_serper,
    max_results=100,
    key_variable="SERPER_API_KEY",
    key_place="header",
    key_name="X-API-KEY",
    per_second=50.0,
    concurrency=32,
)


# SerpAPI: Google results, or those of another engine by the field `engine`. https://serpapi.com/search


def _build_serpapi(query: str, num_results: int) -> Fields:
    """The URL parameters of one search."""
    return {"engine": "google", "q": query, "num": num_results}


def _parse_serpapi(answer: Any) -> list[Result]:
    """The organic results. Raises `ValueError` for a search that failed.

    A search that found nothing has the status "Success", an `error` that says so, and no results.
    """
    answer = object_of(answer)
    if "organic_results" in answer:
        return read_results(answer["organic_results"], "link", lambda item: text_of(item, "snippet"))
    metadata = answer.get("search_metadata")
    if isinstance(metadata, dict) and metadata.get("status") == "Success":
        return []
    raise ValueError(f"there is no 'organic_results', and the search did not succeed: {answer.get('error')}")


SERPAPI = Provider(
    name="serpapi",
    endpoint="https://serpapi.com/search",
    method="GET",
    build=_build_serpapi,
    parse=_parse_serpapi,
    max_results=100,
    key_variable="SERPAPI_API_KEY",
    key_place="parameter",
    key_name="api_key",
    per_second=5.0,
)


# Google Programmable Search (Custom Search JSON API). The field `cx` names the search engine that was set up.


def _build_google(query: str, num_results: int) -> Fields:
    """The URL parameters of one search, without `cx`."""
    return {"q": query, "num": num_results}


def _parse_google(answer: Any) -> list[Result]:
    """The items; an answer without any found nothing. Raises `ValueError` when it is no search answer."""
    answer = object_of(answer)
    if "items" in answer:
        return read_results(answer["items"], "link", lambda item: text_of(item, "snippet"))
    if answer.get("kind") == "customsearch#search":
        return []
    raise ValueError("there is neither 'items' nor the kind 'customsearch#search'")


GOOGLE = Provider(
    name="google",
    endpoint="https://www.googleapis.com/customsearch/v1",
    method="GET",
    build=_build_google,
    parse=_parse_google,
    max_results=10,
    key_variable="GOOGLE_API_KEY",
    key_place="parameter",
    key_name="key",
    needs=("cx",),
    per_second=1.5,
)


# Brave Search. https://api.search.brave.com/res/v1/web/search


def _build_brave(query: str, num_results: int) -> Fields:
    """The URL parameters of one search: plain text without marks around the matching words.

    With the field `extra_snippets`, which not every plan has, a result has up to five more passages.
    """
    return {"q": query, "count": num_results, "text_decorations": "false"}


def _parse_brave(answer: Any) -> list[Result]:
    """The web results; an answer of the type "search" without any found nothing. Raises `ValueError`."""
    answer = object_of(answer)
    web = answer.get("web")
    if web is None and answer.get("type") == "search":
        return []
    found = read_results(object_of(web).get("results"), "url", _brave_text)
    return [Result(html.unescape(result.title), result.url, html.unescape(result.text)) for result in found]


def _brave_text(item: Fields) -> str:
    more = item.get("extra_snippets") or []
    if not isinstance(more, list) or not all(isinstance(snippet, str) for snippet in more):
        raise ValueError("'extra_snippets' of a result is not a list of strings")
    return "\n".join([text_of(item, "description"), *more])


BRAVE = Provider(
    name="brave",
    endpoint="https://api.search.brave.com/res/v1/web/search",
    method="GET",
    build=_build_brave,
    parse=_parse_brave,
    max_results=20,
    key_variable="BRAVE_API_KEY",
    key_place="header",
    key_name="X-Subscription-Token",
    per_second=1.0,
)


# Tavily: passages of pages with a relevance score. https://api.tavily.com/search


def _build_tavily(query: str, num_results: int) -> Fields:
    """The JSON body of one search; the depth "basic" costs one credit."""
    return {"query": query, "max_results": num_results, "search_depth": "basic"}


def _parse_tavily(answer: Any) -> list[Result]:
    """The results with their scores. Raises `ValueError` when there is no `results` list."""
    answer = object_of(answer)
    if "results" not in answer:
        raise ValueError("there is no 'results'")
    return read_results(answer["results"], "url", lambda item: text_of(item, "content"), score="score")


TAVILY = Provider(
    name="tavily",
    endpoint="https://api.tavily.com/search",
    method="POST",
    build=_build_tavily,
    parse=_parse_tavily,
    max_results=20,
    key_variable="TAVILY_API_KEY",
    key_place="header",
    key_name="Authorization",
    key_prefix="Bearer ",
    per_second=1.5,
)


PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in (SERPER, SERPAPI, GOOGLE, BRAVE, TAVILY)}
