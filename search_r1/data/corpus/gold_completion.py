"""Add missing gold passages to a corpus; its existing rows are copied byte for byte, in the same order."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.data.corpus.answer_matching import AnswerTokens, answer_tokens, spaced
from search_r1.data.corpus.audit import matcher_of, read_questions, summarize
from search_r1.data.qa.paragraphs import gold_paragraphs
from search_r1.errors import CorpusError
from search_r1.search.corpus import parse_passage, passage_contents, title_and_text
from search_r1.search.jsonl import read_lines, read_objects
from search_r1.search.manifest import check_not_read
from verl.process.storage import whole_file

Row = dict[str, Any]


class MissingPassages:
    """Gold passages that have not been found in the corpus so far.

    A gold passage is found if a passage of the corpus has the same normalised contents, or the same normalised title
    and, in its text, all of the gold text.
    """

    def __init__(self) -> None:
        self._by_contents: dict[AnswerTokens, GoldPassage] = {}
        self._by_title: dict[AnswerTokens, list[tuple[str, AnswerTokens]]] = {}

    def add(self, gold: GoldPassage) -> bool:
        """Add a gold passage; False if an equal one was added before. Raises `CorpusError` if it has no words."""
        key = answer_tokens(gold.contents)
        if not key:
            raise CorpusError(f"{gold.file}, line {gold.line}: the passage has no word; remove it or give it a text")
        if key in self._by_contents:
            return False
        self._by_contents[key] = gold
        title, text = map(answer_tokens, title_and_text(gold.contents))
        if title and text:  # without a title, only the whole text says what a passage is about
            self._by_title.setdefault(title, []).append((spaced(text), key))
        return True

    def see(self, contents: str, tokens: AnswerTokens) -> None:
        """Remove the gold passages that this passage of the corpus contains; `tokens` are those of its contents."""
        self._by_contents.pop(tokens, None)
        title, text = title_and_text(contents)
        if alike := self._by_title.get(answer_tokens(title)):
            held = spaced(answer_tokens(text))
            for gold_text, key in alike:
                if gold_text in held:
                    self._by_contents.pop(key, None)

    def left(self) -> list[GoldPassage]:
        """The passages not found, in the order of `add`."""
        return list(self._by_contents.values())


class NewIds:
    """Ids that no row of the corpus has, made without storing all of its ids.

    If all ids are row numbers, as in the published corpora, the numbering continues; else `added-N`, with N above any.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._are_row_numbers = True
        self._largest = -1

    def see(self, identifier: str) -> None:
        """Register the id of the next row of the corpus."""
        self._are_row_numbers &= identifier == str(self._rows)
        self._rows += 1
        if match := re.fullmatch(r"added-([0-9]+)", identifier):
            self._largest = max(self._largest, int(match[1]))

    def make(self, count: int) -> list[str]:
        """`count` new ids; call it after `see` for all rows."""
        if self._are_row_numbers:
            return [str(self._rows + i) for i in range(count)]
        return [f"added-{self._largest + 1 + i}" for i in range(count)]


def complete(corpus: Path, passages: Sequence[Path], questions: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write `output`: the rows of `corpus`, then the missing gold passages; returns the report.

    Gold passages are the rows of the files `passages` and those in the metadata of `questions`, whose coverage is
    measured before and after. One pass over the corpus; only the gold passages are kept in memory. Raises
    `CorpusError`, or `StorageError` if `output` cannot be written; it is unchanged then.
    """
    # Read everything but the corpus first: a bad file is found before the long pass.
    check_not_read("--output", output, [corpus, *passages, *questions])
    missing, sources = _read_gold(passages, questions)
    sets = {str(file): read_questions(file) for file in questions}
    matcher = matcher_of(question for rows in sets.values() for question in rows)
    # One pass copies the rows, notes their ids, and finds the gold passages and answers in them. What is then missing
    # follows; the output appears only once it is complete.
    ids, before, rows = NewIds(), set(), 0
    with (
        whole_file(output) as unfinished,
        gzip.open(unfinished, "wb") if output.suffix.lower() == ".gz" else unfinished.open("wb") as file,
    ):
        for rows, line in read_lines(corpus):
            file.write(line if line.endswith(b"\n") else line + b"\n")
            passage = parse_passage(line, corpus, rows)
            tokens = answer_tokens(passage["contents"])
            ids.see(passage["id"])
            missing.see(passage["contents"], tokens)
            before |= matcher.find(tokens)
        added = list(zip(ids.make(len(missing.left())), missing.left(), strict=True))
        for name, gold in added:
            row = {"id": name, "contents": gold.contents}
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())

    # The report, with the coverage before and after.
    after = before.union(*(matcher.find(answer_tokens(gold.contents)) for _, gold in added))
    return {
        "corpus": str(corpus),
        "output": str(output),
        "rows_before": rows,
        "rows_added": len(added),
        "sources": _count(sources, added),
        "added": [{"id": name, "file": gold.file, "line": gold.line, "of": gold.source_id} for name, gold in added],
        "coverage": [
            {"file": file, "before": summarize(group, before), "after": summarize(group, after)}
            for file, group in sets.items()
        ],
    }


def _read_gold(passages: Iterable[Path], questions: Iterable[Path]) -> tuple[MissingPassages, list[dict[str, Any]]]:
    missing = MissingPassages()
    sources: list[dict[str, Any]] = []
    for file in passages:
        new = [missing.add(gold) for gold in read_passages(file)]
        sources.append({"file": str(file), "gold": len(new), "repeated": new.count(False)})
    for file in questions:
        groups = [[missing.add(gold) for gold in golds] for golds in read_metadata(file)]
        new = [is_new for group in groups for is_new in group]
        without = {"questions_without_gold": groups.count([])}
        sources.append({"file": str(file), "gold": len(new), "repeated": new.count(False)} | without)
    return missing, sources


def _count(sources: list[dict[str, Any]], added: list[tuple[str, GoldPassage]]) -> list[dict[str, Any]]:
    counts = Counter(gold.file for _, gold in added)
    return [
        source
        | {"added": counts[source["file"]], "there": source["gold"] - source["repeated"] - counts[source["file"]]}
        for source in sources
    ]


# The passages that questions were written from: rows of their own, or paragraphs in the metadata of a question.


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
            paragraphs = gold_paragraphs(question.get("metadata") or {})
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: {error}") from error
        yield [_gold(paragraph, question, path, number) for paragraph in paragraphs]


def _gold(row: Row, named: Row, path: Path, number: int) -> GoldPassage:
    try:
        contents = passage_contents(row)
    except ValueError as error:
        remedy = 'each row must be {"contents": "..."} or {"title": "...", "text": "..."}'
        raise CorpusError(f"{path}, line {number}: {error}; {remedy}") from error
    return GoldPassage(contents, str(path), number, str(named.get("id", "")))
