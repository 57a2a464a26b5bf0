"""Bamboogle: a CSV file with the columns `Question` and `Answer` (ofirpress/self-ask), without ids."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"Question", "Answer"}


def fields(row: dict[str, Any]) -> Fields:
    return Fields(row["Question"], [row["Answer"]])
