"""The online engines: how a request is built, and how a reply is parsed into the documents of the retrieval protocol.
Both are pure functions.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from search_r1.search.online.deny_list import DenyList
from search_r1.search.sanitize import strip_agent_tags, title_of, whole_characters
from search_r1.search.server.source_interface import ScoredPassage

Fields = dict[str, Any]

_LONGEST_WORD = 30  # characters


@dataclass(frozen=True)
class WebResult:
    """One web result. `score` is the engine's own (higher is better), None if it gives only a ranking."""

    title: str
    url: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class Provider:
    """One engine.

    `build(query, num_results)` returns the fields of a request without its API key: URL parameters of a GET, the JSON
    body of a POST. `parse(answer)` returns the results in the decoded JSON of an HTTP 200, best first, and raises
    `ValueError` if it is not as documented. `per_second` and `concurrency` are what a small plan allows. `max_chars`
    and `max_words` are the limits of a query, where the engine documents them.
    """

    name: str
    endpoint: str
    method: Literal["GET", "POST"]
    build: Callable[[str, int], Fields]
    parse: Callable[[Any], list[WebResult]]
    max_results: int
    key_variable: str
    key_place: Literal["header", "parameter"]
    key_name: str
    key_prefix: str = ""
    needs: tuple[str, ...] = ()
    per_second: float = 1.0
    concurrency: int = 8
    max_chars: int | None = None
    max_words: int | None = None

    def shortened(self, query: str) -> str:
        """`query`, or its first words if it is longer than the engine takes.

        A word of more than 30 characters, as in a script without spaces, may be cut anywhere.
        """
        words = query.split()
        if self.max_words is not None and len(words) > self.max_words:
            query = " ".join(words[: self.max_words])
        if self.max_chars is None or len(query) <= self.max_chars:
            return query
        start = query[: self.max_chars]
        at_word = start if query[self.max_chars].isspace() else start.rpartition(" ")[0]
        return (at_word if len(start) - len(at_word) <= _LONGEST_WORD else start).rstrip()


def read_results(items: Any, url: str, text: Callable[[Fields], str], score: str | None = None) -> list[WebResult]:
    """The results in a list of objects; `url` and `score` name their keys. Results without an address are skipped.

    Raises `ValueError` for anything but a list of objects with text in their fields; a title may be a number.
    """
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the results are not a list of objects")
    return [
        WebResult(
            title_of(item.get("title")) or text_of(item, "title"),
            text_of(item, url),
            text(item),
            _number(item.get(score)),
        )
        for item in items
        if text_of(item, url)
    ]


def text_of(item: Fields, name: str) -> str:
    """A text field; "" if it is absent or null. Raises `ValueError` if it is anything else."""
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name!r} of a result is a {type(value).__name__}, not a string")
    return value or ""


def object_of(answer: Any) -> Fields:
    """`answer`, if it is a JSON object. Raises `ValueError` otherwise."""
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is a {type(answer).__name__}, not an object")
    return answer


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def list_reader(
    name: str,
    url: str,
    text: str,
    score: str | None = None,
    found_nothing: Callable[[Fields], bool] = lambda _: False,
) -> Callable[[Any], list[WebResult]]:
    """A function that reads the list `name` of a reply; `url`, `text` and `score` are the keys of its items.

    A reply without the list is empty if `found_nothing` holds, else the function raises `ValueError`.
    """

    def parse(answer: Any) -> list[WebResult]:
        answer = object_of(answer)
        if name in answer:
            return read_results(answer[name], url, lambda item: text_of(item, text), score)
        if found_nothing(answer):
            return []
        said = f", and the search did not succeed: {answer['error']}" if answer.get("error") else ""
        raise ValueError(f"there is no {name!r}{said}")

    return parse


def _read_brave(answer: Any) -> list[WebResult]:
    """The web results; an answer of the type "search" without any found nothing. Raises `ValueError`."""
    answer = object_of(answer)
    web = answer.get("web")
    if web is None and answer.get("type") == "search":
        return []
    found = read_results(object_of(web).get("results"), "url", _brave_text)
    return [WebResult(html.unescape(result.title), result.url, html.unescape(result.text)) for result in found]


def _brave_text(item: Fields) -> str:
    """The text of a result of Brave: its description, and up to five more passages in `extra_snippets`, by plan."""
    more = item.get("extra_snippets") or []
    if not isinstance(more, list) or not all(isinstance(snippet, str) for snippet in more):
        raise ValueError("'extra_snippets' of a result is not a list of strings")
    return "\n".join([text_of(item, "description"), *more])


def _succeeded(answer: Fields) -> bool:
    """Whether a search by SerpAPI succeeded. One that found nothing has an `error` that says so, and no results."""
    metadata = answer.get("search_metadata")
    return isinstance(metadata, dict) and metadata.get("status") == "Success"


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider(  # Google results
            name="serper",
            endpoint="https://google.serper.dev/search",
            method="POST",
            build=lambda query, num_results: {"q": query, "num": num_results},
            parse=list_reader("organic", "link", "snippet"),
            max_results=100,
            key_variable="SERPER_API_KEY",
            key_place="header",
            key_name="X-API-KEY",
            per_second=50.0,
            concurrency=32,
        ),
        Provider(  # Google results, or those of another engine by the field `engine`
            name="serpapi",
            endpoint="https://serpapi.com/search",
            method="GET",
            build=lambda query, num_results: {"engine": "google", "q": query, "num": num_results},
            parse=list_reader("organic_results", "link", "snippet", found_nothing=_succeeded),
            max_results=100,
            key_variable="SERPAPI_API_KEY",
            key_place="parameter",
            key_name="api_key",
            per_second=5.0,
        ),
        Provider(  # Programmable Search (Custom Search JSON API); `cx` names the search engine that was set up
            name="google",
            endpoint="https://www.googleapis.com/customsearch/v1",
            method="GET",
            build=lambda query, num_results: {"q": query, "num": num_results},
            parse=list_reader(
                "items", "link", "snippet", found_nothing=lambda answer: answer.get("kind") == "customsearch#search"
            ),
            max_results=10,
            key_variable="GOOGLE_API_KEY",
            key_place="parameter",
            key_name="key",
            needs=("cx",),
            per_second=1.5,
        ),
        Provider(  # plain text, without marks around the matching words
            name="brave",
            endpoint="https://api.search.brave.com/res/v1/web/search",
            method="GET",
            build=lambda query, num_results: {"q": query, "count": num_results, "text_decorations": "false"},
            parse=_read_brave,
            max_results=20,
            key_variable="BRAVE_API_KEY",
            key_place="header",
            key_name="X-Subscription-Token",
            per_second=1.0,
            max_chars=400,
            max_words=50,
        ),
        Provider(  # passages of pages with a relevance score; the depth "basic" costs one credit
            name="tavily",
            endpoint="https://api.tavily.com/search",
            method="POST",
            build=lambda query, num_results: {
                "query": query,
                "max_results": num_results,
                "search_depth": "basic",
            },
            parse=list_reader("results", "url", "content", score="score"),
            max_results=20,
            key_variable="TAVILY_API_KEY",
            key_place="header",
            key_name="Authorization",
            key_prefix="Bearer ",
            per_second=1.5,
            max_chars=400,
        ),
    )
}


def to_documents(results: list[WebResult], source: str, deny: DenyList) -> list[ScoredPassage]:
    """(document, score) of the results that `deny` allows, by descending score; a repeated page counts once.

    The score is the engine's own if every result has one, else 1 / rank in the engine's answer.
    """
    scored = bool(results) and all(result.score is not None for result in results)
    kept: dict[str, ScoredPassage] = {}
    for rank, result in enumerate(results, start=1):
        if result.url not in kept and not deny.denies(result.url):
            score = result.score if scored and result.score is not None else 1 / rank
            kept[result.url] = (_document(result, source), score)
    return sorted(kept.values(), key=lambda found: -found[1])


def _document(result: WebResult, source: str) -> dict[str, Any]:
    title = strip_agent_tags(" ".join(whole_characters(result.title).split()))
    # no tag of the agent in the address either: it may be shown beside the text
    url = whole_characters(result.url).replace("<", "%3C").replace(">", "%3E")
    contents = strip_agent_tags(f'"{title}"\n{whole_characters(result.text).strip()}')
    return {"id": url, "url": url, "contents": contents, "title": title, "source": source}
