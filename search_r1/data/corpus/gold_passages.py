"""The passages that questions were written from: rows of their own, or paragraphs in the metadata of a question.

Metadata, as FlashRAG ships it (and as the original sets have it):

- HotpotQA, 2WikiMultiHopQA: `supporting_facts` names the titles of the gold paragraphs in `context`. Both are columns,
  `{"title": [..], "sentences" or "content": [[..], ..]}` and `{"title": [..], "sent_id": [..]}`, or lists of pairs,
  `[[title, sentences], ..]` and `[[title, sentence number], ..]`.
- MuSiQue: `question_decomposition[..].support_paragraph`, or those of `paragraphs` with `is_supporting`, each
  `{"title", "paragraph_text"}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.errors import CorpusError
from search_r1.search.corpus import passage_contents
from search_r1.search.jsonl import read_objects

Row = dict[str, Any]


@dataclass(frozen=True)
class GoldPassage:
    """`contents` as in a corpus; `source_id` is the id of its row or its question."""

    contents: str
    file: str
    line: int
    source_id: str


def read_passages(path: Path) -> Iterator[GoldPassage]:
    """Rows `{"id"?, "contents"}` or `{"id"?, "title", "text"}`. Raises `CorpusError` naming file and line."""
    for number, row in read_objects(path):
        yield _gold(row, row, path, number)


def read_metadata(path: Path) -> Iterator[list[GoldPassage]]:
    """The gold paragraphs of each question of a file; none if its metadata has none. Raises `CorpusError`."""
    for number, question in read_objects(path):
        try:
            paragraphs = list(_paragraphs(question.get("metadata") or {}))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CorpusError(
                f"{path}, line {number}: the gold paragraphs in 'metadata' cannot be read ({error!r}); "
                "docs/retrieval_corpus.md lists the forms that can"
            ) from error
        yield [_gold(paragraph, question, path, number) for paragraph in paragraphs]


def _gold(row: Row, named: Row, path: Path, number: int) -> GoldPassage:
    try:
        contents = passage_contents(row)
    except ValueError as error:
        remedy = 'each row must be {"contents": "..."} or {"title": "...", "text": "..."}'
        raise CorpusError(f"{path}, line {number}: {error}; {remedy}") from error
    return GoldPassage(contents, str(path), number, str(named.get("id", "")))


def _paragraphs(metadata: Row) -> Iterator[Row]:
    """`{"title", "text"}` of each gold paragraph, in the order of the metadata."""
    if "context" in metadata and "supporting_facts" in metadata:
        titles = {title for title, *_ in _pairs(metadata["supporting_facts"], "sent_id")}
        for title, sentences in _pairs(metadata["context"], "sentences", "content"):
            if title in titles:
                yield {"title": title, "text": " ".join(" ".join(sentences).split())}
    steps = [step.get("support_paragraph") for step in metadata.get("question_decomposition") or []]
    marked = [paragraph for paragraph in metadata.get("paragraphs") or [] if paragraph["is_supporting"]]
    for paragraph in [*filter(None, steps), *marked]:
        yield {"title": paragraph["title"], "text": paragraph["paragraph_text"]}


def _pairs(value: Any, *columns: str) -> Iterator[tuple[str, Any]]:
    """(title, other) of a table in columns or in pairs."""
    if not isinstance(value, dict):
        yield from ((title, other) for title, other in value)
        return
    [other, *_] = [value[column] for column in columns if column in value]
    yield from zip(value["title"], other, strict=True)
