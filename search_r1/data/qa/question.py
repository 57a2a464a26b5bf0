"""One question with its gold answers, as every format gives it, and the checks that all of them share."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from search_r1.llm_agent.templates import normalize_question

_WORDS = {True: "yes", False: "no"}
_OF_PROMPT_FILES = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclass(frozen=True)
class Fields:
    """What a format finds in a row, not checked yet. `id` None: the format has no ids."""

    question: Any
    answers: Any
    id: Any = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class QaRow:
    """A row that can be used. `index` counts the rows of its file from 0, also those that are left out."""

    id: str
    question: str
    """Stripped, with a question mark at its end."""
    golden_answers: list[str]
    """As in the source; at least one is not blank."""
    metadata: str | None
    """JSON."""
    index: int


def answer_texts(value: Any) -> Any:
    """A list of answers; one answer alone, or JSON text of a list (a cell of a table), is one too.

    Truth values are yes and no, and a whole number is its digits. What is no list of texts is left for `checked` to
    refuse: a fraction, say, which could be written in more than one way.
    """
    if isinstance(value, str):
        value = _parsed_list(value)
    values = value if isinstance(value, list) else [value]
    return [_text_of(answer) for answer in values]


def _text_of(answer: Any) -> Any:
    if isinstance(answer, bool):
        return _WORDS[answer]
    return str(answer) if isinstance(answer, int) else answer


def further_fields(row: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The metadata: what stands in the column `metadata`, an object or JSON of one, and all columns not `read`.

    Those of a prompt file, which can be made into another one, are no news. Raises `ValueError` for other metadata.
    """
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata) if metadata.strip() else None
        except ValueError:
            raise ValueError(f"metadata is the text {_shown(metadata)}, not an object or JSON of one") from None
    if not isinstance(metadata, dict | None):
        raise ValueError(f"metadata is a {type(metadata).__name__}, not an object")
    known = {*read, "id", "metadata", *_OF_PROMPT_FILES}
    others = {name: value for name, value in row.items() if name not in known and value is not None}
    return others | (metadata or {})


def _parsed_list(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith("[") else text
    except ValueError:
        return text


def checked(fields: Fields, split: str, index: int) -> QaRow:
    """Raises `ValueError` with the reason. A row of a format without ids gets `split_index`."""
    if not isinstance(fields.question, str) or not fields.question.strip():
        raise ValueError(f"the question is {_shown(fields.question)}, not a text")
    if not isinstance(fields.answers, list) or not all(isinstance(answer, str) for answer in fields.answers):
        raise ValueError(f"the gold answers are {_shown(fields.answers)}, not a list of texts")
    if not any(answer.strip() for answer in fields.answers):
        raise ValueError("there is no gold answer")
    row = QaRow(
        id=_identifier(fields.id, f"{split}_{index}"),
        question=normalize_question(fields.question),
        golden_answers=fields.answers,
        metadata=json.dumps(fields.metadata, ensure_ascii=False, default=str) if fields.metadata else None,
        index=index,
    )
    for text in (row.id, row.question, *row.golden_answers, row.metadata or ""):
        text.encode()  # half a surrogate pair cannot be stored: UnicodeEncodeError is a ValueError
    return row


def _identifier(value: Any, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"the id is {_shown(value)}, not a text or a number")
    return str(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
