"""The tool `search`: passages for one query or several, from the retriever of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import Grammar
from search_r1.llm_agent.observations import ObservationWriter
from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.corpus import title_line_and_text
from search_r1.search.sanitize import whole_characters
from verl.agent.text import encode_outside, fits_in, longest_start
from verl.agent.tools.definition import Tool, ToolError, ToolResult
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

_SEPARATOR = "\n\n"


class SearchTool(Tool):
    """Searches for `query`, for each of `queries`, or for both; the queries share the length of the result."""

    name = "search"
    timeout_s = None  # the retriever has a deadline of its own, and missing it is no fault of the policy
    max_result_tokens: int
    needs_retriever = True
    example = {"query": "What is the capital of France?"}

    def __init__(
        self,
        searcher: Searcher,
        tokenizer: PreTrainedTokenizerBase,
        max_result_tokens: int,
        max_queries: int = 5,
        show_ids: bool = True,
        max_passage_tokens: int | None = None,
        description: str = "Search a collection of texts. Gives the best passages, best first.",
    ) -> None:
        """`max_queries` of one call; `show_ids`: passages are shown with their ids, which `open_page` takes;
        `max_passage_tokens`: of each passage, what is beyond is not shown (None: all of it is)."""
        if max_passage_tokens is not None and max_passage_tokens < 1:
            raise ConfigError(f"the tool search has max_passage_tokens={max_passage_tokens}; make it 1 or more")
        self.description, self.max_result_tokens = description, max_result_tokens
        self.parameters = {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "a question or keywords"},
                "queries": {
                    "type": "array",
                    "items": {"type": "string"},
                    "maxItems": max_queries,
                    "description": "several such queries at once, instead of query",
                },
            },
            "additionalProperties": False,
        }
        self._searcher, self._tokenizer, self._show_ids = searcher, tokenizer, show_ids
        self._max_passage_tokens = max_passage_tokens

    @classmethod
    def from_config(
        cls, config: Config | None, tokenizer: PreTrainedTokenizerBase | None, **options: Any
    ) -> SearchTool:
        """The search by `retriever` of the config; a result has at most `data.max_obs_length` tokens by default."""
        if config is None or tokenizer is None:
            raise ConfigError("the tool search needs a config and a tokenizer")
        return cls(Searcher.from_config(config.retriever), tokenizer, config.data.max_obs_length, **options)

    async def search(self, query: str) -> list[Mapping[str, Any]]:
        """The documents of one query, best first. Raises `EnvironmentUnavailable`."""
        return list(await self._searcher.search(query))

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """See `Tool.call`. The event is that of a search; with several queries, it has the lists of all of them."""
        # Either parameter may be there, or both; equal queries are searched once.
        given = [*([arguments["query"]] if "query" in arguments else []), *arguments.get("queries", [])]
        queries = list(dict.fromkeys(query.strip() for query in given if query.strip()))
        if not queries:
            raise ToolError("give a query that is not empty")
        started = time.perf_counter()
        found = await _all([self._searcher.search(query) for query in queries])
        # The event names the documents that the policy saw; those that did not fit are only in `num_found`.
        text, shown = self._write(queries, found)
        documents = [document for part in shown for document in part]
        ids = (document.get("id") for document in documents)
        return ToolResult(
            text,
            {
                "query": "; ".join(queries),
                "queries": queries,
                "executed": True,
                "document_ids": ["" if name is None else whole_characters(str(name)) for name in ids],
                "num_found": sum(map(len, found)),
                "milliseconds": 1000 * (time.perf_counter() - started),
                "observation": text,
            },
        )

    async def check(self) -> None:
        """See `Tool.check`."""
        await self._searcher.check()

    async def close(self) -> None:
        """See `Tool.close`."""
        await self._searcher.close()

    def _write(
        self, queries: Sequence[str], found: Sequence[Sequence[Mapping[str, Any]]]
    ) -> tuple[str, list[Sequence[Mapping[str, Any]]]]:
        """The passages of all queries within the length, and which are shown. What is left goes to later queries."""
        text, shown, most = "", list[Sequence[Mapping[str, Any]]](), self.max_result_tokens
        for number, (query, documents) in enumerate(zip(queries, found, strict=True)):
            head = text + (_SEPARATOR if text else "") + (f"Results for {query!r}:\n" if len(queries) > 1 else "")
            left = most - len(encode_outside(self._tokenizer, head))
            writer = ObservationWriter(self._tokenizer, max(0, left // (len(queries) - number)), _NO_TAGS)
            observation = writer.write([self._shown(document) for document in documents])
            text = head + observation.text
            shown.append(documents[: observation.num_documents])
        return text, shown

    def _shown(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """The document with its id in the title, and with the beginning of a long text."""
        title, text = title_line_and_text(document["contents"])
        if not fits_in(self._tokenizer, title, self.max_result_tokens // 2):
            # The first paragraph of a text without a title: as a title it would leave no room for the id.
            title, text = "", document["contents"]
        most = self._max_passage_tokens
        if most is not None:
            text = longest_start(text[: 100 * most], lambda part: fits_in(self._tokenizer, part, most))
        name = document.get("id")
        head = f"{title}, id: {name}" if name is not None and self._show_ids else title
        return {"contents": f"{head}\n{text}"}


async def _all(searches: Sequence[Any]) -> list[Any]:
    """The results of all searches; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(search) for search in searches]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class _NoTags(Grammar):
    """Passages without tags around them: the format of a chat has its own place for results of tools."""

    @property
    def tags(self) -> tuple[str, ...]:
        return ()

    def wrap_information(self, body: str) -> str:
        return body.strip()


_NO_TAGS = _NoTags()
