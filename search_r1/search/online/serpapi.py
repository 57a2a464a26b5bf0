"""SerpAPI: Google results, or those of another engine by the field `engine`. https://serpapi.com/search"""

from __future__ import annotations

from typing import Any

from search_r1.search.online.provider import Fields, Provider, Result, object_of, read_results, text_of


def build(query: str, num_results: int) -> Fields:
    """The URL parameters of one search."""
    return {"engine": "google", "q": query, "num": num_results}


def parse(answer: Any) -> list[Result]:
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
    build=build,
    parse=parse,
    max_results=100,
    key_variable="SERPAPI_API_KEY",
    key_place="parameter",
    key_name="api_key",
    per_second=5.0,
)
