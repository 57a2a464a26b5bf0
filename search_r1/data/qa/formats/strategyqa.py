"""StrategyQA: an array of `{"qid", "question", "answer": true, ..}`; true means yes, false means no."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"qid", "question"}


def fields(row: dict[str, Any]) -> Fields:
    """The other keys are the metadata. Raises `ValueError` for an answer that is not a boolean."""
    if not isinstance(row.get("answer"), bool):
        raise ValueError(f"answer is {row.get('answer')!r}, not true or false")
    metadata = {key: value for key, value in row.items() if key not in {"qid", "question", "answer"}}
    return Fields(row["question"], ["yes" if row["answer"] else "no"], row["qid"], metadata)
