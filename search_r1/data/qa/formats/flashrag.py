"""FlashRAG: `{"id", "question", "golden_answers": [..], "metadata"?}`. A truth value among the answers is yes or no."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"question", "golden_answers"}
_WORDS = {True: "yes", False: "no"}


def fields(row: dict[str, Any]) -> Fields:
    answers, metadata = row["golden_answers"], row.get("metadata")
    if isinstance(answers, list):
        answers = [_WORDS[answer] if isinstance(answer, bool) else answer for answer in answers]
    if not isinstance(metadata, dict | None):
        raise ValueError(f"metadata is a {type(metadata).__name__}, not an object")
    return Fields(row["question"], answers, row.get("id"), metadata)
