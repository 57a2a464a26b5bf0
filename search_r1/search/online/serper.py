"""Serper: Google results. https://google.serper.dev/search"""

from __future__ import annotations

from typing import Any

from search_r1.search.online.provider import Fields, Provider, Result, object_of, read_results, text_of


def build(query: str, num_results: int) -> Fields:
    """The JSON body of one search."""
    return {"q": query, "num": num_results}


def parse(answer: Any) -> list[Result]:
    """The organic results. Raises `ValueError` when there is no `organic` list."""
    answer = object_of(answer)
    if "organic" not in answer:
        raise ValueError("there is no 'organic'")
    return read_results(answer["organic"], "link", lambda item: text_of(item, "snippet"))


SERPER = Provider(
    name="serper",
    endpoint="https://google.serper.dev/search",
    method="POST",
    build=build,
    parse=parse,
    max_results=100,
    key_variable="SERPER_API_KEY",
    key_place="header",
    key_name="X-API-KEY",
    per_second=50.0,
    concurrency=32,
)
