"""PopQA: a TSV file whose column `possible_answers` holds a JSON list (AlexTMallen/adaptive-retrieval)."""

from __future__ import annotations

import json
from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"id", "question", "possible_answers"}


def fields(row: dict[str, Any]) -> Fields:
    """The other columns are the metadata. Raises `ValueError` if the answers are not JSON."""
    answers = row["possible_answers"]
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except ValueError as error:
            raise ValueError(f"possible_answers is no JSON list: {error}") from error
    return Fields(row["question"], answers, row["id"], {key: row[key] for key in row if key not in KEYS})
