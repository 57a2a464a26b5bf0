"""The formats of rows in question files: the keys that identify each, and how a row is read into a question with its
gold answers.

A row has the first format in `FORMATS` whose keys it all has. A `ValueError` from `read` means a bad row; the checks of
a `Question` are shared by all formats.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from search_r1.data.qa.answer_lists import answer_texts, list_in_text
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


Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """One format. `keys`: the columns that a row must have; `read` reads a row that has them."""

    name: str
    keys: frozenset[str]
    read: Callable[[Row], RawQuestion]


def format_of(rows: Iterable[Mapping[str, Any]]) -> Format | None:
    """The format of the first row with a known format."""
    return next((found for row in rows for found in FORMATS if row.keys() >= found.keys), None)


def known_formats() -> str:
    """The names of the formats with their keys, for a message."""
    return "; ".join(f"{found.name} ({', '.join(sorted(found.keys))})" for found in FORMATS)


def read_flashrag(row: Row) -> RawQuestion:
    """FlashRAG, and your own questions: `{"question", "golden_answers", "id"?, "metadata"?, ..}`.

    Other columns are metadata. Raises `ValueError` for metadata that is not an object.
    """
    others = further_fields(row, {"question", "golden_answers"})
    return RawQuestion(row["question"], answer_texts(row["golden_answers"]), row.get("id"), others)


def read_popqa(row: Row) -> RawQuestion:
    """PopQA: a TSV file whose column `possible_answers` holds a list as text (AlexTMallen/adaptive-retrieval).

    The other columns are the metadata. Raises `ValueError` if the answers are no list.
    """
    answers = row["possible_answers"]
    if isinstance(answers, str):
        answers = list_in_text(answers)
        if isinstance(answers, str):
            raise ValueError(f"possible_answers is no JSON list: {answers[:80]!r}")
    return RawQuestion(row["question"], answers, row["id"], _without(row, "id", "question", "possible_answers"))


def read_musique(row: Row) -> RawQuestion:
    """MuSiQue: `{"id", "question", "answer", "answer_aliases", "answerable", "paragraphs", "question_decomposition"}`.

    The answer comes first, then its aliases. Raises `ValueError` for the unanswerable questions of MuSiQue-Full.
    """
    if row.get("answerable") in (False, "False", "false"):  # text in a table
        raise ValueError("the question is marked unanswerable; the files musique_ans_* have those that can be answered")
    aliases = row.get("answer_aliases", [])
    if isinstance(aliases, str):
        aliases = list_in_text(aliases)
    if not isinstance(aliases, list):
        raise ValueError(f"answer_aliases is a {type(aliases).__name__}, not a list")
    answers = [row["answer"], *aliases] if "answer" in row else []
    metadata = _without(row, "id", "question", "answer", "answer_aliases", "answerable")
    return RawQuestion(row["question"], answers, row["id"], metadata)


def read_hotpotqa(row: Row) -> RawQuestion:
    """HotpotQA and 2WikiMultiHopQA: an array of `{"_id", "question", "answer", "type", "supporting_facts", ..}`.

    The other keys are the metadata. Test files have no answer.
    """
    answers = answer_texts(row["answer"]) if "answer" in row else []
    return RawQuestion(row["question"], answers, row["_id"], _without(row, "_id", "question", "answer"))


def read_strategyqa(row: Row) -> RawQuestion:
    """StrategyQA: an array of `{"qid", "question", "answer": true, ..}`; true means yes, false means no.

    The other keys are the metadata. Raises `ValueError` for an answer that is not a boolean.
    """
    if not isinstance(row.get("answer"), bool):
        raise ValueError(f"answer is {row.get('answer')!r}, not true or false")
    answers = ["yes" if row["answer"] else "no"]
    return RawQuestion(row["question"], answers, row["qid"], _without(row, "qid", "question", "answer"))


def read_triviaqa(row: Row) -> RawQuestion:
    """TriviaQA: `{"Data": [{"Question", "QuestionId", "Answer": {"Value", "Aliases", ..}, ..}]}`.

    The value comes first, then its aliases, each once. The evidence pages are left out: they are not part of the
    question.
    """
    answer = row.get("Answer", {})
    if not isinstance(answer, dict) or not isinstance(answer.get("Aliases", []), list):
        raise ValueError("Answer is not an object with a list of Aliases")
    answers = [answer["Value"], *answer.get("Aliases", [])] if "Value" in answer else []
    if all(isinstance(text, str) for text in answers):
        answers = list(dict.fromkeys(answers))
    return RawQuestion(row["Question"], answers, row["QuestionId"])


def read_bamboogle(row: Row) -> RawQuestion:
    """Bamboogle: a CSV file with the columns `Question` and `Answer` (ofirpress/self-ask), without ids."""
    return RawQuestion(row["Question"], answer_texts(row["Answer"]))


def read_plain(row: Row) -> RawQuestion:
    """Your own questions: `{"question", "answer", "id"?, "metadata"?, ..}`.

    NQ-open (google-research-datasets/natural-questions) has this format: `{"question": "who ..", "answer": ["x", ..]}`.
    Other columns are metadata. Raises `ValueError` for metadata that is not an object.
    """
    others = further_fields(row, {"question", "answer"})
    return RawQuestion(row["question"], answer_texts(row["answer"]), row.get("id"), others)


def _without(row: Row, *read: str) -> Row:
    """The columns of a row that were not `read` as its id, question or answers: its metadata."""
    return {key: value for key, value in row.items() if key not in read}


FORMATS = (
    Format("flashrag", frozenset({"question", "golden_answers"}), read_flashrag),
    Format("popqa", frozenset({"id", "question", "possible_answers"}), read_popqa),
    Format("musique", frozenset({"id", "question", "paragraphs"}), read_musique),
    Format("hotpotqa", frozenset({"_id", "question"}), read_hotpotqa),
    Format("strategyqa", frozenset({"qid", "question"}), read_strategyqa),
    Format("triviaqa", frozenset({"Question", "QuestionId"}), read_triviaqa),
    Format("bamboogle", frozenset({"Question", "Answer"}), read_bamboogle),
    Format("plain", frozenset({"question", "answer"}), read_plain),
)
