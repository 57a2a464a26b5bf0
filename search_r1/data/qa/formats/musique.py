"""MuSiQue: `{"id", "question", "answer", "answer_aliases", "answerable", "paragraphs", "question_decomposition"}`."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"id", "question", "paragraphs"}


def fields(row: dict[str, Any]) -> Fields:
    """The answer, then its aliases. Raises `ValueError` for the unanswerable questions of MuSiQue-Full."""
    if row.get("answerable") is False:
        raise ValueError("the question is marked unanswerable; the files musique_ans_* have those that can be answered")
    aliases = row.get("answer_aliases", [])
    if not isinstance(aliases, list):
        raise ValueError(f"answer_aliases is a {type(aliases).__name__}, not a list")
    others = {"id", "question", "answer", "answer_aliases", "answerable"}
    metadata = {key: value for key, value in row.items() if key not in others}
    return Fields(row["question"], [row["answer"], *aliases] if "answer" in row else [], row["id"], metadata)
