"""How many questions have their answer in a corpus, and how many in the best k passages of a retriever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from search_r1.data.corpus.answer_matching import AnswerMatcher, AnswerTokens, answer_tokens
from search_r1.data.corpus.gold_questions import GoldQuestion
from search_r1.search.corpus import parse_passage
from search_r1.search.jsonl import read_lines

Rank = int | None


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
    """For each k: `hits`, the span questions with rank <= k, and their share of all and of the covered span questions.

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
