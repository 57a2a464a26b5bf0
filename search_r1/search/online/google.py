"""Google Programmable Search (Custom Search JSON API). The field `cx` names the search engine that was set up."""

from __future__ import annotations

from typing import Any

from search_r1.search.online.provider import Fields, Provider, Result, object_of, read_results, text_of


def build(query: str, num_results: int) -> Fields:
    """The URL parameters of one search, without `cx`."""
    return {"q": query, "num": num_results}


def parse(answer: Any) -> list[Result]:
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
    build=build,
    parse=parse,
    max_results=10,
    key_variable="GOOGLE_API_KEY",
    key_place="parameter",
    key_name="key",
    needs=("cx",),
    per_second=1.5,
)
