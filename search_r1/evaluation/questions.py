"""The questions of an evaluation: FlashRAG's JSON lines or a set's original file, or training's prompt files.

A question is identified by its set and its id. All files are validated before the first question is asked.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.data.qa.records import kind_of
from search_r1.data.qa.source_files import BadRows, QuestionFile, named_file, read_questions, sources_in
from search_r1.rewards.reading import as_object, evidence_of
from verl.agent.environment import environment_class
from verl.config import Config
from verl.data.files import check_files, read_table
from verl.data.prompts import first_of_each_tags
from verl.errors import ConfigError, DataError

Messages = list[dict[str, str]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """`stratum` is the question's kind according to the set, "" if unknown.

    For a prompt file's row without a question, `text` is None, and `messages` is its prompt. `evidence` are the ids of
    the documents that the answer follows from (`evidence` of the metadata), () if the set does not name any.
    """

    set_name: str
    id: str
    golden_answers: tuple[str, ...]
    text: str | None
    stratum: str = ""
    messages: Messages | None = None
    evidence: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The question's name in an evaluation, and the `group_id` of its trajectory."""
        return f"{self.set_name}/{self.id}"


def load_questions(data: Sequence[str], data_dir: Path | None) -> list[Question]:
    """The questions of all files; those of a set are in file order.

    `data` are `NAME=FILE`, in a format of `search_r1.data.qa.formats`, or a prompt file. A prompt file needs no name:
    its rows then belong to the set of their `data_source`. `data_dir` has a folder for each set. Raises `ConfigError`
    if nothing is given, `DataError` with file and line (or row) for a bad row or a repeated id in a set.
    """
    sources = [named_file(item) or Path(item).expanduser() for item in data]
    sources += [] if data_dir is None else sources_in(data_dir, "test")
    if not sources:
        raise ConfigError("no questions to ask: give --data NAME=FILE, or --data_dir with a folder for each set")
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for source in sources:
        for place, question in _read(source):
            if question.key in seen:
                raise DataError(f"{place}: question {question.id!r} of {question.set_name} is in {seen[question.key]}")
            seen[question.key] = place
            questions.append(question)
    return questions


def check_prompts(questions: Sequence[Question], config: Config) -> None:
    """Raise `ConfigError` if a prompt of a prompt file asks for other tags than an agent of `config` reads, which would
    then never see a search or an answer. A doubt is logged.
    """
    kind = environment_class(config)
    named = ((question.key, question.messages, question.text) for question in questions)
    for key, text in first_of_each_tags(named):
        if not text:  # a question without a prompt of its own, or alone
            continue
        problem = kind.check_prompt_file(config, {}, text)
        if problem is not None and problem.contradicts:
            raise ConfigError(
                f"{key}: {problem.found}; give the template that the prompt file was made with: --template"
            )
        if problem is not None:
            log.warning("%s: %s", key, problem.found)


def _read(source: QuestionFile | Path) -> Iterator[tuple[str, Question]]:
    """(place, question) of each row."""
    name, path = (source.data_source, source.path) if isinstance(source, QuestionFile) else (None, source)
    # Questions, too, may be in Parquet files: a named one is looked into. Without a name it can only be a prompt file.
    if kind_of(path) == ".parquet" and (name is None or _is_prompt_file(path)):
        yield from _prompt_rows(name, path)
        return
    if not isinstance(source, QuestionFile):
        raise ConfigError(f"--data {path}: say which set it is: --data NAME={path}")
    for row in read_questions(path, source.split, _NoBadRows()):
        answers = tuple(row.golden_answers)
        evidence = evidence_of({"metadata": row.metadata})
        question = Question(
            source.data_source, row.id, answers, row.question, _stratum(row.metadata), evidence=evidence
        )
        yield str(path), question


def _is_prompt_file(path: Path) -> bool:
    """Whether a parquet file has the columns of a prompt file; else it holds questions, or cannot be read."""
    try:
        return {"prompt", "reward_model"} <= set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False


class _NoBadRows(BadRows):
    """Raises at the first bad row: no row is left out of an evaluation."""

    def found(self, where: str, reason: str) -> None:
        raise DataError(f"{where}: {reason}; correct the row")


def _prompt_rows(name: str | None, path: Path) -> Iterator[tuple[str, Question]]:
    check_files(str(path))
    for index, row in enumerate(read_table(path, required=("data_source", "prompt", "reward_model")).to_pylist()):
        place, extra = f"{path}: row {index}", as_object(row.get("extra_info"))
        target = as_object(as_object(row["reward_model"]).get("ground_truth")).get("target")
        answers = _answers([target] if isinstance(target, str) else target, place, "reward_model.ground_truth.target")
        text = row.get("question") or extra.get("question")
        identifier = row.get("id") or extra.get("id") or f"{extra.get('split', path.stem)}_{extra.get('index', index)}"
        stratum, evidence = _stratum(row.get("metadata"), extra), evidence_of(row)
        set_name = name or row["data_source"]
        yield place, Question(set_name, str(identifier), answers, text, stratum, row["prompt"], evidence)


def _answers(value: Any, place: str, column: str) -> tuple[str, ...]:
    texts = isinstance(value, list) and all(isinstance(answer, str) for answer in value)
    if not texts or not any(answer.strip() for answer in value):
        raise DataError(f"{place}: '{column}' is {value!r}, not a list of texts with an answer in it")
    return tuple(value)


def _stratum(*described: Any) -> str:
    """The kind of question, how hard it is and how many hops, as the first of `described` with any of these has them.

    Each is an object, or JSON text of one (the column `metadata` of a prompt file); anything else says nothing.
    """
    for values in map(as_object, described):
        parts = [str(values[name]) for name in ("type", "level") if values.get(name) is not None]
        if values.get("hops") is not None:
            parts.append(f"hops {values['hops']}")
        if parts:
            return "/".join(parts)
    return ""


# A fixed part of a set: the same ids on every machine, whatever the order of its file.


def stratified_subset(questions: Sequence[Question], size: int, seed: int = 0) -> list[Question]:
    """`size` questions of each set, or the whole set where it has no more, in the order they came in."""
    by_set: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_set[question.set_name].append(question)
    taken = {question.key for rows in by_set.values() for question in _of_one_set(rows, size, seed)}
    return [question for question in questions if question.key in taken]


def _of_one_set(questions: Sequence[Question], size: int, seed: int) -> list[Question]:
    if len(questions) <= size:
        return list(questions)
    strata: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        strata[question.stratum].append(question)
    places = shares({name: len(rows) for name, rows in strata.items()}, size)

    def digest(question: Question) -> str:
        return hashlib.sha256(f"{seed}/{question.key}".encode()).hexdigest()

    return [question for name, rows in strata.items() for question in sorted(rows, key=digest)[: places[name]]]


def shares(sizes: dict[str, int], places: int) -> dict[str, int]:
    """`places` (at most the sum of the sizes) in proportion to `sizes`, by the largest remainders."""
    total = sum(sizes.values())
    counts = {name: places * size // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(places * sizes[name] % total), name))
    for name in by_remainder[: places - sum(counts.values())]:
        counts[name] += 1
    return counts
