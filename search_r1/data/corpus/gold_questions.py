"""Questions with gold answers, in the files of FlashRAG: `{"id", "question", "golden_answers": [..], "metadata"?}`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.data.corpus.answer_matching import AnswerTokens, answer_tokens
from search_r1.errors import CorpusError
from search_r1.search.jsonl import read_objects

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
