"""Convert web results to the documents of the retrieval protocol."""

from __future__ import annotations

from typing import Any

from search_r1.search.online.deny_list import DenyList
from search_r1.search.online.providers import WebResult
from search_r1.search.sanitize import strip_agent_tags, whole_characters
from search_r1.search.server.source_interface import ScoredPassage


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
