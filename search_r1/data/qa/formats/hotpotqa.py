"""HotpotQA and 2WikiMultiHopQA: an array of `{"_id", "question", "answer", "type", "supporting_facts", ..}`."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"_id", "question"}


def fields(row: dict[str, Any]) -> Fields:
    """The other keys are the metadata. Test files have no answer."""
    metadata = {key: value for key, value in row.items() if key not in {"_id", "question", "answer"}}
    return Fields(row["question"], [row["answer"]] if "answer" in row else [], row["_id"], metadata)
