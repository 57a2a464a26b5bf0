"""One question with its gold answers, as every format returns it, and the checks that all formats share."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from search_r1.llm_agent.templates import normalize_question

_OF_PROMPT_FILES = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclass(frozen=True)
class RawQuestion:
    """A question as a format reads it from a row, not validated yet. `id` None: the format has no ids."""

    question: Any
    answers: Any
    id: Any = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class QaRow:
    """A valid row. `index` counts the rows of its file from 0, skipped ones included."""

    id: str
    question: str
    """Stripped, with a question mark at its end."""
    golden_answers: list[str]
    """As in the source; at least one of them is not blank."""
    metadata: str | None
    """JSON."""
    index: int


def further_fields(row: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The metadata: the column `metadata` (an object, or one as text in JSON or Python), and all columns not `read`.

    The columns of a prompt file, which can be an input as well, are left out. Raises `ValueError` for other metadata.
    """
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = _object_in_text(metadata) if metadata.strip() else None
    if not isinstance(metadata, dict | None):
        raise ValueError(f"metadata is a {type(metadata).__name__}, not an object")
    known = {*read, "id", "metadata", *_OF_PROMPT_FILES}
    others = {name: value for name, value in row.items() if name not in known and value is not None}
    return others | (metadata or {})


def _object_in_text(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"metadata is the text {_shown(text)}, not an object or JSON of one")


def checked(fields: RawQuestion, split: str, index: int) -> QaRow:
    """The validated row. Raises `ValueError` with the reason. In a format without ids, a row gets `split_index`."""
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
