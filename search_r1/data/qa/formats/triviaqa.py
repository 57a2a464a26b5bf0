"""TriviaQA: `{"Data": [{"Question", "QuestionId", "Answer": {"Value", "Aliases", ..}, ..}]}`."""

from __future__ import annotations

from typing import Any

from search_r1.data.qa.question import Fields

KEYS = {"Question", "QuestionId"}


def fields(row: dict[str, Any]) -> Fields:
    """The value, then its aliases, each once. The evidence pages are left out: they are not part of the question."""
    answer = row.get("Answer", {})
    if not isinstance(answer, dict) or not isinstance(answer.get("Aliases", []), list):
        raise ValueError("Answer is not an object with a list of Aliases")
    answers = [answer["Value"], *answer.get("Aliases", [])] if "Value" in answer else []
    if all(isinstance(text, str) for text in answers):
        answers = list(dict.fromkeys(answers))
    return Fields(row["Question"], answers, row["QuestionId"])
