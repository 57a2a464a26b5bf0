"""NQ-open (google-research-datasets/natural-questions): `{"question": "who ..", "answer": ["x", ..]}`, without ids."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"question", "answer"}


def fields(row: dict[str, Any]) -> Fields:
    return Fields(row["question"], row["answer"])
