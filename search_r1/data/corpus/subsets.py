"""Answerable questions of question files, in files for training, validation and testing that share nothing.

A question is `direct` if a passage among the first k of a search for it contains a gold answer. It is `second_query` if
only a second search does: one for a gold title (`gold_titles`) that the question or the first passages name, as the
bridge entity of a question of two hops is. For a question without gold titles, those of the corpus are tried that the
first passages name; its row then gets `titles` in its metadata.

Its evidence are the passages with the answer and, for a second query, those that name the title. Questions that share a
passage of their evidence, or their text, are in the same split, whichever subset and file they are of.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_task import Progress
from search_r1.data.corpus.answer_matching import CorpusTitles, answer_tokens, names
from search_r1.data.corpus.audit import GoldQuestion, matcher_of, read_questions
from search_r1.data.qa.paragraphs import gold_titles
from search_r1.errors import CorpusError
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import title_and_text
from search_r1.search.jsonl import read_objects
from verl.process.storage import whole_file

SUBSETS = ("direct", "second_query")
SPLITS = ("train", "validation", "test")
SHARES = (0.8, 0.1, 0.1)
"""The share of the questions in each split."""
_SENT_TOGETHER = 256


@dataclass(frozen=True)
class Answerable:
    """A question whose answer is found: its subset, its row, and its evidence, by contents."""

    subset: str
    row: Mapping[str, Any]
    evidence: frozenset[str]


def write_subsets(
    corpus: Path,
    url: str,
    files: Sequence[Path],
    k: int,
    folder: Path,
    seed: int = 0,
    shares: Sequence[float] = SHARES,
) -> list[dict[str, Any]]:
    """Write `folder/SUBSET/SPLIT.jsonl` with rows of `files`; returns the counts, a row for each subset.

    `corpus` is what the server at `url` searches; it is read if a question has no gold titles.

    Raises `CorpusError` for a bad file and for an id that two rows have, `RetrieverError` if a search fails,
    `StorageError` if a file cannot be written. Nothing is written before all questions were searched.
    """
    questions, rows, taken = list[GoldQuestion](), list[dict[str, Any]](), dict[str, Path]()
    for file in files:
        for question, (_, row) in zip(read_questions(file), read_objects(file), strict=True):
            if question.id in taken:
                raise CorpusError(
                    f"{file}: the id {question.id!r} is also in {taken[question.id]}; give each question its own id"
                )
            taken[question.id] = file
            questions.append(question)
            rows.append({"id": question.id} | row)
    found = asyncio.run(find_answerable(corpus, url, questions, rows, k))
    splits = split(found, seed, shares)
    # Each file appears whole, also one without rows.
    counts = Counter(zip((one.subset for one in found), splits, strict=True))
    for subset in SUBSETS:
        for name in SPLITS:
            chosen = (one.row for one, of in zip(found, splits, strict=True) if (one.subset, of) == (subset, name))
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
            path = folder / subset / f"{name}.jsonl"
            with whole_file(path) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
    return [{"subset": subset} | {name: counts[subset, name] for name in SPLITS} for subset in SUBSETS]


async def find_answerable(
    corpus: Path, url: str, questions: Sequence[GoldQuestion], rows: Sequence[Mapping[str, Any]], k: int
) -> list[Answerable]:
    """The answerable ones of the questions, in their order; a search gives k passages. `rows` are those of the file."""
    spans = [
        (question, row, _gold_titles(row))
        for question, row in zip(questions, rows, strict=True)
        if question.kind == "span"
    ]
    titles = None if all(gold for _, _, gold in spans) else CorpusTitles.read(corpus)
    client = RetrievalClient(url, topk=k)

    async def search(query: str) -> list[str]:
        return [str(passage["contents"]) for passage in await client.search(query)]

    async def find(question: GoldQuestion, row: Mapping[str, Any], gold: Sequence[str]) -> Answerable | None:
        matcher = matcher_of([question])
        first = await search(question.text)
        if shown := frozenset(text for text in first if matcher.find(answer_tokens(text))):
            return Answerable("direct", row, shown)
        # the titles that a second search could be for
        found_titles = [title_and_text(text)[0] for text in first]
        linked = titles.named_in("\n".join(first)) if titles and not gold else []
        for title in gold or [title for title in linked if title not in found_titles]:
            naming = [text for text in first if names(text, title)]
            if not naming and not (gold and names(question.text, title)):
                continue
            if shown := frozenset(text for text in await search(title) if matcher.find(answer_tokens(text))):
                if not gold:
                    hops = [title_and_text(naming[0])[0], title]
                    row = {**row, "metadata": {**(row.get("metadata") or {}), "titles": hops}}
                return Answerable("second_query", row, shown | frozenset(naming))
        return None

    found: list[Answerable] = []
    try:
        await client.check()
        with Progress("questions", len(spans)) as progress:
            for start in range(0, len(spans), _SENT_TOGETHER):
                part = spans[start : start + _SENT_TOGETHER]
                found += filter(None, await asyncio.gather(*(find(*asked) for asked in part)))
                progress.update(len(part))
    finally:
        await client.close()
    return found


def _gold_titles(row: Mapping[str, Any]) -> list[str]:
    try:
        return gold_titles(row.get("metadata") or {})
    except ValueError as error:
        raise CorpusError(f"question {row['id']}: {error}") from error


def split(found: Sequence[Answerable], seed: int = 0, shares: Sequence[float] = SHARES) -> list[str]:
    """The split of each question, about as large as `shares` says: those that share something are kept together."""
    # Groups: questions that are connected by a text or a passage, however many steps apart.
    parent: dict[Any, Any] = {}

    def root(node: Any) -> Any:
        while parent.setdefault(node, node) != node:
            parent[node] = node = parent[parent[node]]
        return node

    for number, one in enumerate(found):
        for shared in (answer_tokens(str(one.row["question"])), *one.evidence):
            parent[root(shared)] = root(number)
    groups: dict[Any, list[int]] = {}
    for number in range(len(found)):
        groups.setdefault(root(number), []).append(number)
    # The largest first, each to the split that lacks most of its share.
    drawn = list(groups.values())
    random.Random(seed).shuffle(drawn)
    missing = {name: share * len(found) for name, share in zip(SPLITS, shares, strict=True)}
    splits = [""] * len(found)
    for group in sorted(drawn, key=len, reverse=True):
        name = max(missing, key=lambda name: missing[name])
        missing[name] -= len(group)
        for number in group:
            splits[number] = name
    return splits
