"""The coverage audit: which gold answers a corpus contains, and which of them a running server finds.

The questions are in the files of FlashRAG: `{"id", "question", "golden_answers": [..], "metadata"?}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_task import Progress
from search_r1.data.corpus.answer_matching import AnswerMatcher, AnswerTokens, answer_tokens
from search_r1.errors import CorpusError
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import parse_passage
from search_r1.search.jsonl import read_lines, read_objects

_LOG = logging.getLogger(__name__)

_NO_EVIDENCE = {("yes",), ("no",)}


@dataclass(frozen=True)
class GoldQuestion:
    """One row of a question file.

    `answers` are the gold answers to look for, normalised: without "yes" and "no", which prove nothing, since any text
    has them, and without those that normalise to nothing ("The").
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    answers: tuple[AnswerTokens, ...]
    kind: str
    """`span`: it has an answer to look for; `yes_no`: only yes or no; `empty`: every answer normalises to nothing."""


def read_questions(path: Path) -> list[GoldQuestion]:
    """All questions of a `.jsonl` or `.jsonl.gz` file. Raises `CorpusError` naming file and line."""
    return [_question(row, path, number) for number, row in read_objects(path)]


def _question(row: dict[str, Any], path: Path, number: int) -> GoldQuestion:
    text, golden = row.get("question"), row.get("golden_answers")
    if not isinstance(text, str) or not text.strip():
        raise CorpusError(f"{path}, line {number}: no 'question' (a string with text)")
    if not isinstance(golden, list) or not golden or not all(isinstance(answer, str) for answer in golden):
        raise CorpusError(f"{path}, line {number}: 'golden_answers' is {golden!r}, not a list of strings")
    return make_question(str(row.get("id", number)), text, golden)


def make_question(identifier: str, text: str, golden: Sequence[str]) -> GoldQuestion:
    """A question with its `answers` and `kind`."""
    answers = searched_answers(golden)
    if answers:
        kind = "span"
    elif _NO_EVIDENCE & set(map(answer_tokens, golden)):
        kind = "yes_no"
    else:
        kind = "empty"
    return GoldQuestion(identifier, text, tuple(golden), answers, kind)


def searched_answers(golden: Iterable[str]) -> tuple[AnswerTokens, ...]:
    """The answers to look for in a corpus: see `GoldQuestion.answers`."""
    normalized = dict.fromkeys(answer_tokens(answer) for answer in golden)
    return tuple(answer for answer in normalized if answer and answer not in _NO_EVIDENCE)


_SENT_TOGETHER = 256
Rank = int | None


@dataclass(frozen=True)
class Audit:
    """`report` is for JSON; `details` has a row for each span question that is not covered or was not found."""

    report: dict[str, Any]
    details: list[dict[str, Any]]


def audit(corpus: Path, files: Sequence[Path], url: str | None, ks: Sequence[int]) -> Audit:
    """Read the corpus once, and search the server at `url` for the best max(ks) passages of each question.

    Raises `CorpusError` for a bad file and `RetrieverError` if a search fails.
    """
    # The questions of all files together: the server is asked, and the corpus read, once for all of them.
    sets = {str(file): read_questions(file) for file in files}
    pooled = [question for questions in sets.values() for question in questions]
    ranks = None if url is None else asyncio.run(server_ranks(url, pooled, max(ks)))
    num_passages, found = scan_corpus(corpus, matcher_of(pooled))
    # The results by file, then over all questions.
    rows, details, start = [], [], 0
    for file, questions in sets.items():
        part = None if ranks is None else ranks[start : start + len(questions)]
        rows.append({"file": file} | _row(questions, found, part, ks))
        details += [{"file": file} | row for row in _details(questions, found, part)]
        start += len(questions)
    _warn_of_another_corpus(corpus, pooled, found, ranks)
    total = _row(pooled, found, ranks, ks)
    return Audit({"corpus": str(corpus), "passages": num_passages, "url": url, "files": rows, "total": total}, details)


async def server_ranks(url: str, questions: Sequence[GoldQuestion], k: int) -> list[Rank]:
    """`first_rank` of each question in the server's best k; None, without a search, if it has no answer to look for."""
    client = RetrievalClient(url, topk=k)

    async def rank_of(question: GoldQuestion) -> Rank:
        if question.kind != "span":
            return None
        passages = await client.search(question.text)
        return first_rank(question, (answer_tokens(passage["contents"]) for passage in passages))

    ranks: list[Rank] = []
    try:
        await client.check()
        with Progress("questions", len(questions)) as progress:
            # One part after the other: this bounds the searches that wait at a time, and lets the progress be seen.
            for start in range(0, len(questions), _SENT_TOGETHER):
                part = questions[start : start + _SENT_TOGETHER]
                ranks += await asyncio.gather(*map(rank_of, part))
                progress.update(len(part))
    finally:
        await client.close()
    return ranks


def write_details(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _row(
    questions: Sequence[GoldQuestion], found: set[AnswerTokens], ranks: Sequence[Rank] | None, ks: Sequence[int]
) -> dict[str, Any]:
    row = summarize(questions, found)
    return row if ranks is None else row | {"recall": recall(questions, found, ranks, ks)}


def _details(
    questions: Sequence[GoldQuestion], found: set[AnswerTokens], ranks: Sequence[Rank] | None
) -> list[dict[str, Any]]:
    rows = []
    for i, question in enumerate(questions):
        covered = is_covered(question, found)
        # Without ranks nothing was searched, so that only the coverage can be at fault.
        missed = ranks is not None and ranks[i] is None
        if question.kind == "span" and (missed or not covered):
            rows.append(
                {
                    "id": question.id,
                    "question": question.text,
                    "golden_answers": list(question.golden_answers),
                    "covered": covered,
                }
            )
    return rows


def _warn_of_another_corpus(
    corpus: Path, questions: Sequence[GoldQuestion], found: set[AnswerTokens], ranks: Sequence[Rank] | None
) -> None:
    pairs = zip(questions, ranks or [], strict=False)
    stray = sum(rank is not None and not is_covered(question, found) for question, rank in pairs)
    if stray:
        _LOG.warning(
            "the server finds the answers of %d questions that are not in %s: it serves another corpus, and the shares "
            "of covered questions mean nothing; pass its own corpus by --corpus_path",
            stray,
            corpus,
        )


# How many questions have their answer in a corpus, and how many in the best k passages of a retriever.


def matcher_of(questions: Iterable[GoldQuestion]) -> AnswerMatcher:
    """A matcher for the answers of all questions."""
    return AnswerMatcher(answer for question in questions for answer in question.answers)


def scan_corpus(path: Path, matcher: AnswerMatcher) -> tuple[int, set[AnswerTokens]]:
    """(number of passages, answers that occur in any of them), in one pass. Raises `CorpusError`."""
    found: set[AnswerTokens] = set()
    number = 0
    for number, line in read_lines(path):
        found |= matcher.find(answer_tokens(parse_passage(line, path, number)["contents"]))
    return number, found


def first_rank(question: GoldQuestion, passages: Iterable[Sequence[str]]) -> Rank:
    """Rank, from 1, of the first passage (its tokens) that contains a gold answer; None if none does."""
    matcher = matcher_of([question])
    return next((rank for rank, tokens in enumerate(passages, start=1) if matcher.find(tokens)), None)


def is_covered(question: GoldQuestion, found: set[AnswerTokens]) -> bool:
    """Whether any of its answers is among those `found` in the corpus."""
    return not found.isdisjoint(question.answers)


def summarize(questions: Sequence[GoldQuestion], found: set[AnswerTokens]) -> dict[str, Any]:
    """Counts by kind; `covered` and `coverage` (share) are about the span questions. A share of none is None."""
    spans = [question for question in questions if question.kind == "span"]
    covered = sum(is_covered(question, found) for question in spans)
    return {
        "questions": len(questions),
        "yes_no": sum(question.kind == "yes_no" for question in questions),
        "empty": sum(question.kind == "empty" for question in questions),
        "span": len(spans),
        "covered": covered,
        "coverage": _share(covered, len(spans)),
    }


def recall(
    questions: Sequence[GoldQuestion], found: set[AnswerTokens], ranks: Sequence[Rank], ks: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """For each k, the `hits` (span questions with rank <= k) and their share of all and of the covered span questions.

    `ranks` are those of `first_rank`, in the order of the questions.
    """
    spans = [(q, rank) for q, rank in zip(questions, ranks, strict=True) if q.kind == "span"]
    covered = sum(is_covered(question, found) for question, _ in spans)
    table = {}
    for k in ks:
        hits = sum(rank is not None and rank <= k for _, rank in spans)
        table[str(k)] = {"hits": hits, "of_all": _share(hits, len(spans)), "of_covered": _share(hits, covered)}
    return table


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
