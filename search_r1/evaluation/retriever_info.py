"""What a retrieval service reports about itself, so that results can be traced to a corpus and an index."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from search_r1.http.address import addresses_of, without_credentials
from search_r1.llm_agent.search_engine import Searcher
from verl.config import RetrieverConfig
from verl.errors import ConfigError

_PATHS = ("/info", "/healthz")
_DEADLINE_S = 5.0
_VERSION = "index_version"
_IDENTITY = ("retriever", "corpus_size", _VERSION)  # what does not change when the same index is served otherwise


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
    versions = {url: info[_VERSION] for url, info in found.items() if _has(info)}
    if len(set(versions.values())) > 1:
        raise ConfigError(f"the servers of retriever.url hold different indexes: {versions}; start them over the same")
    return next(map(_identity, found.values()), None)


async def retriever_info(url: str) -> dict[str, Any] | None:
    """The JSON object from `/info`, or else `/healthz`, of the service at `url`; None if it has neither."""
    parts = urlsplit(url)
    token = os.environ.get("RETRIEVAL_AUTH_TOKEN", "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token and parts.username is None else {}
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for path in _PATHS:
            try:
                async with session.get(f"{parts.scheme}://{parts.netloc}{path}") as response:
                    found = json.loads(await response.text()) if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            if isinstance(found, dict):
                return found
    return None


def check_same_index(settings_file: Path, served: dict[str, Any] | None) -> None:
    """Raises `ConfigError` if the evaluation of `settings_file` exists and was made with another index."""
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or one that the store judges
        before = json.loads(settings_file.read_text(encoding="utf-8"))["retriever"]["serves"]
    if served is None or not (_has(before) and _has(served)) or before[_VERSION] == served[_VERSION]:
        return
    raise ConfigError(
        f"{settings_file.parent} has an evaluation over another index: it was {_shown(before)}, and the retriever "
        f"serves {_shown(served)} now. Serve the earlier one again, give another --output_dir, or start over with "
        "--restart, which deletes what is there"
    )


def _identity(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info.get(name) for name in _IDENTITY} if _has(info) else info


def _has(info: Any) -> bool:
    return isinstance(info, dict) and _VERSION in info


def _shown(info: dict[str, Any]) -> str:
    return f"version {info[_VERSION]} ({info.get('retriever')}, {info.get('corpus_size')} passages)"
