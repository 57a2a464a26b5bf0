"""FlashRAG, and your own questions: `{"question", "golden_answers", "id"?, "metadata"?, ..}`."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields, answer_texts, further_fields

KEYS = {"question", "golden_answers"}


def fields(row: dict[str, Any]) -> Fields:
    """Other columns are metadata. Raises `ValueError` for metadata that is not an object."""
    return Fields(row["question"], answer_texts(row["golden_answers"]), row.get("id"), further_fields(row, KEYS))
