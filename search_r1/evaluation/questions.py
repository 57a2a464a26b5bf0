"""The questions of an evaluation: FlashRAG's JSON lines or a set's original file, or training's prompt files.

A question is known by its set and its id. Files are checked whole before anything is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.data.qa.reading import BadRows, read_questions
from verl.data.files import check_files, read_table
from verl.errors import ConfigError, DataError

SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven sets of Search-R1 under their names in the FlashRAG collection."""
SPLITS = ("test", "dev", "train")
"""A set is evaluated on the first of these that there is."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """`stratum` is what the set says about the question's kind, "" for nothing.

    `text` is None, and `messages` are there, for a row of a prompt file that has its prompt but no question.
    """

    set_name: str
    id: str
    golden_answers: tuple[str, ...]
    text: str | None
    stratum: str = ""
    messages: Messages | None = None

    @property
    def key(self) -> str:
        """Names it in an evaluation; the `group_id` of its trajectory."""
        return f"{self.set_name}/{self.id}"


def load_questions(data: Sequence[str], data_dir: Path | None) -> list[Question]:
    """The questions of all files, those of a set in the order of its file.

    `data` are `NAME=FILE`, in a format of `search_r1.data.qa.formats` or `.parquet`; a prompt file may stand without a
    name, its rows then belong to the set of their `data_source`. `data_dir` has a folder for each set that it holds.
    Raises `ConfigError` when nothing is given, `DataError` with file and line (or row) for a bad row and for two of one
    set and id.
    """
    sources = [_split(item) for item in data] + (list(_sets_of(data_dir)) if data_dir is not None else [])
    if not sources:
        raise ConfigError("no questions to ask: give --data NAME=FILE, or --data_dir with a folder for each set")
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for name, path in sources:
        for place, question in _read(name, path):
            if question.key in seen:
                raise DataError(f"{place}: question {question.id!r} of {question.set_name} is in {seen[question.key]}")
            seen[question.key] = place
            questions.append(question)
    return questions


def _split(item: str) -> tuple[str | None, Path]:
    name, separator, path = item.partition("=")
    return (name, Path(path)) if separator else (None, Path(item))


def _sets_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Those of `SETS` in their order, then further folders with a file of a known split, by name."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; it has to hold <set>/<split>.jsonl")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = []
    for name in [*(name for name in SETS if name in names), *(name for name in names if name not in SETS)]:
        files = (folder / name / f"{split}.jsonl{end}" for split in SPLITS for end in ("", ".gz"))
        path = next((path for path in files if path.is_file()), None)
        if path is not None:
            found.append((name, path))
    if not found:
        raise DataError(f"{folder} has no <set>/<split>.jsonl; sets are {', '.join(SETS)}, splits {', '.join(SPLITS)}")
    yield from found


def _read(name: str | None, path: Path) -> Iterator[tuple[str, Question]]:
    """(place, question) of each row."""
    if path.suffix == ".parquet":
        return _prompt_rows(name, path)
    if not name:
        raise ConfigError(f"--data {path}: say which set it is: --data NAME={path}")
    return _question_file(name, path)


def _question_file(name: str, path: Path) -> Iterator[tuple[str, Question]]:
    split = path.name.partition(".")[0]
    for row in read_questions(path, split, _NoBadRows()):
        yield str(path), Question(name, row.id, tuple(row.golden_answers), row.question, _stratum(row.metadata))


class _NoBadRows(BadRows):
    """Nothing is left out of an evaluation."""

    def found(self, where: str, reason: str) -> None:
        raise DataError(f"{where}: {reason}; correct the row")


def _prompt_rows(name: str | None, path: Path) -> Iterator[tuple[str, Question]]:
    check_files(str(path))
    for index, row in enumerate(read_table(path, required=("data_source", "prompt", "reward_model")).to_pylist()):
        place, extra = f"{path}: row {index}", row.get("extra_info") or {}
        target = (row["reward_model"].get("ground_truth") or {}).get("target")
        answers = _answers([target] if isinstance(target, str) else target, place, "reward_model.ground_truth.target")
        text = row.get("question") or extra.get("question")
        identifier = row.get("id") or extra.get("id") or f"{extra.get('split', path.stem)}_{extra.get('index', index)}"
        stratum = _stratum(row.get("metadata"), extra)
        yield place, Question(name or row["data_source"], str(identifier), answers, text, stratum, row["prompt"])


def _answers(value: Any, place: str, column: str) -> tuple[str, ...]:
    texts = isinstance(value, list) and all(isinstance(answer, str) for answer in value)
    if not texts or not any(answer.strip() for answer in value):
        raise DataError(f"{place}: '{column}' is {value!r}, not a list of texts with an answer in it")
    return tuple(value)


def _stratum(*described: Any) -> str:
    """What the first of `described` that says anything says: the kind of question, how hard it is, how many hops.

    Each is an object, or JSON text of one (the column `metadata` of a prompt file); anything else says nothing.
    """
    for values in map(_as_object, described):
        parts = [str(values[name]) for name in ("type", "level") if values.get(name) is not None]
        if values.get("hops") is not None:
            parts.append(f"hops {values['hops']}")
        if parts:
            return "/".join(parts)
    return ""


def _as_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
