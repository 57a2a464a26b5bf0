"""What a retrieval service says about itself, so that numbers can be traced to a corpus and an index."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from search_r1.llm_agent.search_engine import Searcher
from verl.config import RetrieverConfig

_PATHS = ("/info", "/healthz")
_DEADLINE_S = 5.0


async def serves(retriever: RetrieverConfig) -> dict[str, Any] | None:
    """What the retriever says about itself, if anything. Raises `EnvironmentUnavailable` when it does not answer."""
    searcher = Searcher.from_config(retriever)
    try:
        await searcher.check()
    finally:
        await searcher.close()
    return await retriever_info(retriever.url) if retriever.engine is None else None


async def retriever_info(url: str) -> dict[str, Any] | None:
    """The JSON object of `/info`, else of `/healthz`, of the (first) service at `url`; None when it has neither."""
    parts = urlsplit(url.split(",")[0].strip())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_DEADLINE_S)) as session:
        for path in _PATHS:
            try:
                async with session.get(f"{parts.scheme}://{parts.netloc}{path}") as response:
                    found = json.loads(await response.text()) if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            if isinstance(found, dict):
                return found
    return None
