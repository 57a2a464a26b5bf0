"""The formats of rows in question files: the keys that identify each, and how a row is read.

A row has the first format in `FORMATS` whose keys it all has. A `ValueError` from `read` means a bad row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from search_r1.data.qa.answer_lists import answer_texts, list_in_text
from search_r1.data.qa.question import RawQuestion, further_fields

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
