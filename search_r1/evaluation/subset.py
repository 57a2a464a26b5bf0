"""A fixed part of a set: the same ids on every machine, whatever the order of its file.

Questions are divided into strata by kind. A stratum gets its share of the places, rounded down; remaining places go to
the largest remainders (ties in order of names). From a stratum, the questions with the smallest SHA-256 of
"seed/set/id" are taken.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from search_r1.evaluation.questions import Question


def stratified_subset(questions: Sequence[Question], size: int, seed: int = 0) -> list[Question]:
    """`size` questions of each set, or the whole set where it has no more, in the order they came in."""
    by_set: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_set[question.set_name].append(question)
    taken = {question.key for rows in by_set.values() for question in _of_one_set(rows, size, seed)}
    return [question for question in questions if question.key in taken]


def _of_one_set(questions: Sequence[Question], size: int, seed: int) -> list[Question]:
    if len(questions) <= size:
        return list(questions)
    strata: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        strata[question.stratum].append(question)
    places = shares({name: len(rows) for name, rows in strata.items()}, size)
    return [
        question
        for name, rows in strata.items()
        for question in sorted(rows, key=lambda question: _digest(question, seed))[: places[name]]
    ]


def shares(sizes: dict[str, int], places: int) -> dict[str, int]:
    """`places` (at most the sum of the sizes) in proportion to `sizes`, by the largest remainders."""
    total = sum(sizes.values())
    counts = {name: places * size // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(places * sizes[name] % total), name))
    for name in by_remainder[: places - sum(counts.values())]:
        counts[name] += 1
    return counts


def _digest(question: Question, seed: int) -> str:
    return hashlib.sha256(f"{seed}/{question.key}".encode()).hexdigest()
