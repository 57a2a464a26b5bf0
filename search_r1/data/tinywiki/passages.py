"""BM25 over the passages of worlds, in process: searched by the demonstrator and used to measure the difficulty.

The training run searches through the retrieval server; this index gives the same observation text without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import bm25s

from search_r1.data.tinywiki.world import World
from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.llm_agent.observations import format_passage


@dataclass(frozen=True)
class WorldPassage:
    """One passage: the entity it is about (world name and number) and its text."""

    world: str
    entity: int
    contents: str

    @property
    def title(self) -> str:
        """The first line, quotes kept."""
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        return self.contents.split("\n", 1)[1]


class PassageIndex:
    """BM25 search over all passages of some worlds; answers are cached by query and topk."""

    def __init__(self, worlds: Sequence[World]) -> None:
        self.passages = [
            WorldPassage(world.name, entity, world.contents(entity))
            for world in worlds
            for entity in range(world.num_entities)
        ]
        self._retriever = bm25s.BM25()
        self._retriever.index(_tokenize([passage.contents for passage in self.passages]), show_progress=False)
        self._cache: dict[tuple[str, int], list[WorldPassage]] = {}

    def search(self, queries: Sequence[str], topk: int) -> list[list[WorldPassage]]:
        """Return up to `topk` passages per query, best first."""
        missing = sorted({query for query in queries if (query, topk) not in self._cache})
        if missing:
            documents, _ = self._retriever.retrieve(
                _tokenize(missing), k=min(topk, len(self.passages)), show_progress=False
            )
            for query, row in zip(missing, documents, strict=True):
                self._cache[query, topk] = [self.passages[number] for number in row]
        return [self._cache[query, topk] for query in queries]


def _tokenize(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def observation(passages: Sequence[WorldPassage]) -> str:
    """Return the text the environment shows for a search, the same bytes as in training."""
    return SEARCH_R1.wrap_information("".join(format_passage(i, p.contents) for i, p in enumerate(passages, start=1)))
