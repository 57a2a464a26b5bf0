"""Write the questions of several sets into one prompt file: its schema, its rows, with passages retrieved beforehand if
asked for, and the file as a whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.data.qa.formats import QaRow
from search_r1.data.qa.source_files import BadRows, QuestionFile, read_questions
from search_r1.llm_agent.observations import format_passage
from search_r1.llm_agent.templates import FINGERPRINT_KEY, TEMPLATE_KEY, Template, normalize_question
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import Corpus
from text_file import read_text
from verl.errors import DataError
from verl.process.storage import whole_file

Documents = Sequence[Mapping[str, Any]]


class Contexts:
    """The best `topk` passages of each question, from a cache or else from a running retriever.

    `cache` is a JSON file `{question: [{"id": ..}, ..]}`, best first; its ids are looked up in `corpus`, unless the
    documents have `contents`. Its questions are normalised like those of the prompts. Raises `DataError` for a
    malformed cache, and for a question without passages from either.
    """

    def __init__(self, cache: Path | None, corpus: Path | None, retriever_url: str | None, topk: int) -> None:
        self._cache_path, self._cache = cache, _read_cache(cache) if cache else {}
        self._corpus = Corpus(corpus) if cache and corpus else None
        self._row_of: dict[str, int] | None = None
        self._url, self._topk = retriever_url, topk

    def of(self, rows: Sequence[QaRow]) -> list[str]:
        """One context per row: lines `Doc 1(Title: "title") text`."""
        cached = [self._cached(row.question) for row in rows]
        missing = [row.question for row, documents in zip(rows, cached, strict=True) if documents is None]
        searched = iter(self._search(missing))
        return [
            "".join(format_passage(number, self._contents(document)) for number, document in enumerate(documents, 1))
            for documents in (found if found is not None else next(searched) for found in cached)
        ]

    def _cached(self, question: str) -> Documents | None:
        documents = self._cache.get(question)
        if documents is not None and len(documents) < self._topk:
            raise DataError(
                f"{self._cache_path}: {len(documents)} documents for {question!r}, but --topk asks for {self._topk}"
            )
        return documents and documents[: self._topk]

    def _search(self, questions: list[str]) -> list[Documents]:
        if not questions:
            return []
        if self._url is None:
            raise DataError(
                f"{self._cache_path or 'no cache is given, so'}: nothing is retrieved for {questions[0]!r}; "
                "start a retrieval server and pass --retriever_url, or pass a cache that has all questions"
            )
        return asyncio.run(_ask(self._url, questions, self._topk))

    def _contents(self, document: Mapping[str, Any]) -> str:
        if isinstance(document.get("contents"), str):
            return str(document["contents"])
        if self._corpus is None:
            raise DataError(f"{self._cache_path} has ids only; pass the corpus they belong to by --corpus_path")
        return str(self._corpus[self._row(str(document["id"]))]["contents"])

    def _row(self, identifier: str) -> int:
        """The row of a passage. In wiki-18 an id is the number of its row; another corpus is read through once."""
        assert self._corpus is not None
        if self._row_of is None:
            row = int(identifier) if identifier.isdecimal() else len(self._corpus)
            if row < len(self._corpus) and self._corpus[row]["id"] == identifier:
                return row
            wanted = {str(document["id"]) for documents in self._cache.values() for document in documents}
            self._row_of = {passage["id"]: n for n, passage in enumerate(self._corpus) if passage["id"] in wanted}
        if identifier not in self._row_of:
            raise DataError(f"{self._corpus.path} has no passage with the id {identifier!r} of {self._cache_path}")
        return self._row_of[identifier]


def _read_cache(path: Path) -> dict[str, Documents]:
    try:
        cache = json.loads(read_text(path, DataError))
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(cache, dict):
        raise DataError(f'{path}: has to be an object {{question: [{{"id": ..}}, ..]}}')
    for question, documents in cache.items():
        if not isinstance(documents, list) or not all(isinstance(d, dict) and "id" in d for d in documents):
            raise DataError(f'{path}: what is cached for {question!r} is not a list of {{"id": ..}}')
    return {normalize_question(question): documents for question, documents in cache.items()}


async def _ask(url: str, questions: Sequence[str], topk: int) -> list[Documents]:
    client = RetrievalClient(url, topk=topk)
    try:
        await client.check()  # no server is said in seconds, not after the deadline of every search
        return list(await asyncio.gather(*(client.search(question) for question in questions)))
    finally:
        await client.close()


_ROWS_A_SEARCH = 1024
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct([("style", pa.string()), ("ground_truth", pa.struct([("target", pa.list_(pa.string()))]))]),
        ),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        # JSON text: the sets have different fields, and one column has one type.
        ("metadata", pa.string()),
    ]
)
_ROWS_A_GROUP = 4096


@dataclass
class PromptBuilder:
    """Writes prompt files with one template."""

    template: Template
    limit: int | None = None
    """The maximum number of questions from each source."""
    bad_rows: BadRows = field(default_factory=BadRows)

    def write(
        self, path: Path, sources: Sequence[QuestionFile], split: str, contexts: Contexts | None = None
    ) -> list[int]:
        """Write the questions of the `sources`, in order, as `train` or `test`; returns the number from each.

        Raises `DataError` (see `read_questions` and `Contexts`) or `StorageError`, and leaves `path` unchanged then.
        """
        counts = [0] * len(sources)

        def rows() -> Iterator[dict[str, Any]]:
            for number, source in enumerate(sources):
                questions = islice(read_questions(source.path, source.split, self.bad_rows), self.limit)
                for row, context in _with_context(questions, contexts):
                    counts[number] += 1
                    yield prompt_row(row, source.data_source, split, self.template, context)

        write_prompts(path, rows(), self.template)
        return counts


def _with_context(rows: Iterator[QaRow], contexts: Contexts | None) -> Iterator[tuple[QaRow, str | None]]:
    if contexts is None:
        yield from ((row, None) for row in rows)
        return
    while batch := list(islice(rows, _ROWS_A_SEARCH)):
        yield from zip(batch, contexts.of(batch), strict=True)


# The prompt file, which appears only once it is complete.


def prompt_row(row: QaRow, data_source: str, split: str, template: Template, context: str | None) -> dict[str, Any]:
    """A row of `SCHEMA`. `split` is train or test, the use of the row."""
    return {
        "data_source": data_source,
        "prompt": template.messages(row.question, context),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": row.golden_answers}},
        "extra_info": {"split": split, "index": row.index},
        "id": row.id,
        "question": row.question,
        "golden_answers": row.golden_answers,
        "metadata": row.metadata,
    }


def write_prompts(path: Path, rows: Iterable[Mapping[str, Any]], template: Template) -> int:
    """Write `path`, in groups of rows, and return the number of rows. Until it is complete, it has another name.

    The file's metadata has the template's name and fingerprint. Raises `DataError` if there are no rows, `StorageError`
    if the file cannot be written.
    """
    schema = SCHEMA.with_metadata({TEMPLATE_KEY: template.name, FINGERPRINT_KEY: template.fingerprint})
    remaining, count = iter(rows), 0
    with whole_file(path) as unfinished:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            while group := list(islice(remaining, _ROWS_A_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                count += len(group)
        if count == 0:
            raise DataError(f"{path}: there are no questions to write")
    return count
