"""What can be known of retrieval beside the scores: what the service reports about itself, so that results can be
traced to a corpus and an index, and whether the gold answers can be found at all, in the corpus and by a search for the
plain question.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from search_r1.data.corpus.audit import make_question, matcher_of, recall, scan_corpus, server_ranks, summarize
from search_r1.errors import CorpusError, RetrieverError
from search_r1.evaluation.methods import text_of
from search_r1.evaluation.questions import Question
from search_r1.http.client import addresses_of
from search_r1.llm_agent.search_engine import INDEX_VERSION, Searcher, index_named, retriever_info
from url_text import without_credentials
from verl.config import RetrieverConfig
from verl.errors import ConfigError, DataError, EnvironmentUnavailable

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
    # Searches go to any of the servers, so all of them have to hold the same index.
    urls = addresses_of(retriever.url)
    infos = await asyncio.gather(*map(retriever_info, urls))
    found = {without_credentials(url): info for url, info in zip(urls, infos, strict=True) if info is not None}
    versions = {url: info[INDEX_VERSION] for url, info in found.items() if _has(info)}
    if len(set(versions.values())) > 1:
        raise ConfigError(f"the servers of retriever.url hold different indexes: {versions}; start them over the same")
    # With a version, only what names the index is kept; without one, everything that the server says.
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


def corpus_coverage(corpus: Path, questions: Sequence[Question], url: str | None, topk: int) -> dict[str, Any]:
    """`corpus`, `passages`, and a row for each of `sets` and their `total`, as in `search_r1.data.corpus.audit`.

    Without a `url`, nothing is searched, and the rows have no `recall`. Raises `DataError` for a bad corpus and for
    questions without a text, `EnvironmentUnavailable` if the retriever does not answer.
    """
    # The questions of all sets together: the server is asked, and the corpus read, once for all of them.
    searched = [make_question(question.id, text_of(question), question.golden_answers) for question in questions]
    ks = sorted({1, topk})
    try:
        num_passages, found = scan_corpus(corpus, matcher_of(searched))
        ranks = None if url is None else asyncio.run(server_ranks(url, searched, topk))
    except CorpusError as error:
        raise DataError(str(error)) from error
    except RetrieverError as error:
        raise EnvironmentUnavailable(str(error)) from error

    def row(places: Sequence[int]) -> dict[str, Any]:
        part = [searched[place] for place in places]
        counts = summarize(part, found)
        return counts if ranks is None else counts | {"recall": recall(part, found, [ranks[i] for i in places], ks)}

    # Then counted by set, whose questions are known by their places.
    names = dict.fromkeys(question.set_name for question in questions)
    sets = {name: row([i for i, question in enumerate(questions) if question.set_name == name]) for name in names}
    total = row(range(len(questions)))
    return {"corpus": str(corpus), "passages": num_passages, "url": url, "sets": sets, "total": total}
