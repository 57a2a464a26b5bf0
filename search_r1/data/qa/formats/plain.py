"""Your own questions: `{"question", "answer", "id"?, "metadata"?, ..}`.

NQ-open (google-research-datasets/natural-questions) has this format: `{"question": "who ..", "answer": ["x", ..]}`.
"""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields, answer_texts, further_fields

KEYS = {"question", "answer"}


def fields(row: dict[str, Any]) -> Fields:
    """Other columns are metadata. Raises `ValueError` for metadata that is not an object."""
    return Fields(row["question"], answer_texts(row["answer"]), row.get("id"), further_fields(row, KEYS))
