"""Tavily: passages of pages with a relevance score. https://api.tavily.com/search"""

from __future__ import annotations

from typing import Any

from search_r1.search.online.provider import Fields, Provider, Result, object_of, read_results, text_of


def build(query: str, num_results: int) -> Fields:
    """The JSON body of one search; the depth "basic" costs one credit."""
    return {"query": query, "max_results": num_results, "search_depth": "basic"}


def parse(answer: Any) -> list[Result]:
    """The results with their scores. Raises `ValueError` when there is no `results` list."""
    answer = object_of(answer)
    if "results" not in answer:
        raise ValueError("there is no 'results'")
    return read_results(answer["results"], "url", lambda item: text_of(item, "content"), score="score")


TAVILY = Provider(
    name="tavily",
    endpoint="https://api.tavily.com/search",
    method="POST",
    build=build,
    parse=parse,
    max_results=20,
    key_variable="TAVILY_API_KEY",
    key_place="header",
    key_name="Authorization",
    key_prefix="Bearer ",
    per_second=1.5,
)
