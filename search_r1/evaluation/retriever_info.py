"""What a retrieval service reports about itself, so that results can be traced to a corpus and an index."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from search_r1.http.address import addresses_of, without_credentials
from search_r1.llm_agent.search_engine import INDEX_VERSION, Searcher, index_named, retriever_info
from verl.config import RetrieverConfig
from verl.errors import ConfigError

_IDENTITY = ("retriever", "corpus_size", INDEX_VERSION)  # what does not change when the same index is served otherwise


async def serves(retriever: RetrieverConfig) -> dict[str, Any] | None:
    """What the retriever reports about its index, if anything.

    Raises `EnvironmentUnavailable` if it does not answer, `ConfigError` if several servers hold different indexes.
    """
    searcher = Searcher.from_config(retriever)
    try:
        await searcher.check()
    finally:
        await searcher.close()
    if retriever.engine is not None:
        return None
    urls = addresses_of(retriever.url)
    infos = await asyncio.gather(*map(retriever_info, urls))
    found = {without_credentials(url): info for url, info in zip(urls, infos, strict=True) if info is not None}
    versions = {url: info[INDEX_VERSION] for url, info in found.items() if _has(info)}
    if len(set(versions.values())) > 1:
        raise ConfigError(f"the servers of retriever.url hold different indexes: {versions}; start them over the same")
    first = next(iter(found.values()), None)
    if first is None or not _has(first):
        return first
    return {name: first.get(name) for name in _IDENTITY}


def check_same_index(settings_file: Path, served: dict[str, Any] | None) -> None:
    """Raises `ConfigError` if the evaluation of `settings_file` exists and was made with another index."""
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or one that the store judges
        before = json.loads(settings_file.read_text(encoding="utf-8"))["retriever"]["serves"]
    if served is None or not (_has(before) and _has(served)) or before[INDEX_VERSION] == served[INDEX_VERSION]:
        return
    raise ConfigError(
        f"{settings_file.parent} has an evaluation over another index: it was {index_named(before)}, and the retriever "
        f"serves {index_named(served)} now. Serve the earlier one again, give another --output_dir, or start over with "
        "--restart, which deletes what is there"
    )


def _has(info: Any) -> bool:
    return isinstance(info, dict) and INDEX_VERSION in info
