"""The measurements on each question, and the folder that keeps them: its settings, the finished parts, and the results
made from them.

    settings.json                    what the numbers depend on
    parts/records_N.jsonl            finished questions, with their trajectories in
    parts/trajectories/test_step_N.parquet, or records of an earlier part with their verdicts

A part appears atomically: its records are written last, under a temporary name first. So a killed run loses at most the
questions of unfinished parts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.data.corpus.answer_matching import AnswerMatcher, answer_tokens
from search_r1.data.corpus.audit import searched_answers
from search_r1.evaluation.methods import CONTEXT
from search_r1.evaluation.statistics import NUM_RESAMPLES, Estimate, calibration, estimates
from search_r1.rewards.metrics import cover_match, exact_match, token_f1
from search_r1.rewards.reading import Reading, documents_found, evidence_of, read_trajectory
from verl.errors import ConfigError, DataError
from verl.process.storage import whole_file
from verl.protocol import Status, Trajectory
from verl.tracking.trajectory_store import Decode, trajectories_path, write_trajectories, write_trajectory_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from search_r1.llm_agent.grammar import Grammar

METRICS = {
    "em": "EM",
    "f1": "F1",
    "cover_em": "cover-EM",
    "judge": "judge",
    "searches": "searches",
    "calls": "calls",
    "retrieval_recall": "retrieval recall",
    "evidence_recall": "evidence recall",
    "confidence": "confidence",
    "policy_tokens": "policy tokens",
    "total_tokens": "total tokens",
    "invalid_actions": "invalid actions",
    "finished": "finished",
    "latency_s": "latency (s)",
}
"""Column of a record -> its name in tables."""
SCORES = ("em", "f1", "cover_em", "judge", "retrieval_recall", "evidence_recall", "confidence", "finished")
"""The metrics in [0, 1]; if a metric is always 0 or 1, its mean is a share."""


@dataclass(frozen=True)
class Record:
    """One attempt at a question. A metric that does not apply is None; for a FAILED episode, all are.

    `failure` says why there is no finished episode, or no verdict on its answer.

    `retrieval_recall` is 1 if a passage that the model was shown contains a gold answer; it does not apply to questions
    whose answers prove nothing (yes, no), nor to methods without retrieval. `evidence_recall` is the share of the
    question's evidence documents that a search showed; it applies where the set names them. `confidence` is what the
    final turn states ("Confidence: 80%"). `calls` are the tool calls of a chat model
    that were run. `exact_ids`: all token ids are exactly the sampled ones. `queries` are the executed searches.
    """

    set_name: str
    id: str
    question: str
    golden_answers: list[str]
    answer: str | None
    status: str
    failure: str | None
    exact_ids: bool
    metrics: dict[str, float | None]
    queries: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.set_name}/{self.id}"

    @property
    def played(self) -> bool:
        """Whether the episode was finished; otherwise the question has to be asked again."""
        return self.status != Status.FAILED.value

    @property
    def failed(self) -> bool:
        """Whether it is excluded from all means: it was not played, or its answer could not be judged."""
        return self.failure is not None or not self.played

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scored:
    """A trajectory and the seconds it took."""

    trajectory: Trajectory
    latency_s: float


class Measurer:
    """Creates records. `retrieves`: whether the method shows passages.

    `is_exact` returns whether the token ids so far are exactly the sampled ones.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        grammar: Grammar,
        retrieves: bool,
        is_exact: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tokenizer, self._grammar, self._retrieves = tokenizer, grammar, retrieves
        self._is_exact = is_exact

    def measure(self, episodes: Sequence[Scored]) -> list[Record]:
        """A record of each episode. Also sets the reward (EM) and the components of the trajectories."""
        return [self._record(episode) for episode in episodes]

    def _record(self, episode: Scored) -> Record:
        trajectory = episode.trajectory
        reading = read_trajectory(trajectory, self._tokenizer, self._grammar)
        # A failed episode has no metrics, and its trajectory no reward: the question is asked again.
        metrics: dict[str, float | None] = dict.fromkeys(METRICS)
        if trajectory.status is not Status.FAILED:
            metrics = self._metrics(episode, reading)
            trajectory.reward = metrics["em"]
            trajectory.reward_components = {name: value for name, value in metrics.items() if value is not None}
        set_name = trajectory.prompt.data_source
        return Record(
            set_name=set_name,
            id=trajectory.group_id.removeprefix(f"{set_name}/"),
            question=reading.question,
            golden_answers=list(reading.targets),
            answer=reading.answer,
            status="" if trajectory.status is None else trajectory.status.value,
            failure=trajectory.failure,
            exact_ids=self._is_exact(),
            metrics=metrics,
            queries=list(reading.queries),
        )

    def _metrics(self, episode: Scored, reading: Reading) -> dict[str, float | None]:
        trajectory, answer, golden = episode.trajectory, reading.answer, reading.targets
        # Passages in the prompt were searched for before the first turn: they count as shown, and as one search.
        context = trajectory.prompt.row.get(CONTEXT)
        shown = reading.passages if context is None else (context, *reading.passages)
        # Only the events of chat models list calls; a call that was not run is not counted.
        calls = [call for event in trajectory.events for call in event.get("calls") or ()]
        is_chat = any("calls" in event for event in trajectory.events)
        return {
            "em": float(answer is not None and exact_match(answer, golden)),
            "f1": 0.0 if answer is None else token_f1(answer, golden),
            "cover_em": float(answer is not None and cover_match(answer, golden)),
            "judge": None,  # asked for by `judging`, when all have answered
            "searches": float(trajectory.num_searches + (context is not None)),
            "calls": float(sum(call.get("status", "not_run") != "not_run" for call in calls)) if is_chat else None,
            "retrieval_recall": recall(shown, golden) if self._retrieves else None,
            "evidence_recall": evidence_recall(trajectory) if self._retrieves else None,
            "confidence": stated_confidence(reading.turns[-1].text) if reading.answer is not None else None,
            "policy_tokens": float(trajectory.num_policy_tokens),
            "total_tokens": float(trajectory.num_tokens),
            "invalid_actions": float(trajectory.num_turns - trajectory.num_valid_actions),
            "finished": float(trajectory.status is Status.ANSWERED),
            "latency_s": episode.latency_s,
        }


def recall(passages: Sequence[str], golden: Sequence[str]) -> float | None:
    """1 if a passage contains a gold answer, in whole words after normalisation; None if there is none to look for."""
    answers = searched_answers(golden)
    if not answers:
        return None
    matcher = AnswerMatcher(answers)
    return float(any(matcher.find(answer_tokens(passage)) for passage in passages))


def evidence_recall(trajectory: Trajectory) -> float | None:
    """The share of the evidence documents that the searches showed; None if the question names none, or if it is not
    known which documents stand in the prompt."""
    evidence = set(evidence_of(trajectory.prompt.row))
    if not evidence or trajectory.prompt.row.get(CONTEXT) is not None:
        return None
    shown = {one for event in trajectory.events for one in documents_found(event)}
    return len(evidence & shown) / len(evidence)


_CONFIDENCE = re.compile(r"\bconfidence\W{0,8}(\d{1,3}(?:\.\d+)?)\s*%", re.IGNORECASE)


def stated_confidence(text: str) -> float | None:
    """The last confidence in percent that a text states, as a number from 0 to 1; None if it states none."""
    found = _CONFIDENCE.findall(text)
    return min(float(found[-1]), 100.0) / 100 if found else None


SETTINGS, RECORDS, TRAJECTORIES = "settings.json", "records.jsonl", "trajectories.parquet"
RESULTS, PAGE, WRONG_ANSWERS = "results.json", "results.md", "wrong_answers.md"


class Store:
    """Opens or creates the folder. Raises `ConfigError`, naming the differences, if it has other `settings`.

    `restart` deletes what an evaluation wrote there. `settings` must be JSON-serialisable.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], restart: bool = False) -> None:
        self.folder, self._parts = folder, folder / "parts"
        if restart:
            shutil.rmtree(self._parts, ignore_errors=True)
            for name in (SETTINGS, RECORDS, TRAJECTORIES, RESULTS, PAGE, WRONG_ANSWERS):
                (folder / name).unlink(missing_ok=True)
        if (folder / SETTINGS).exists():
            self._compare(settings)
        self._parts.mkdir(parents=True, exist_ok=True)
        self.write(SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def records(self) -> dict[str, Record]:
        """All finished questions by key; the latest record if a question was repeated after a failure."""
        return {record.key: record for number in self._numbers() for record in read_records(self._records_path(number))}

    def add(self, records: Sequence[Record], trajectories: Sequence[Trajectory], decode: Decode) -> None:
        """Write one more part."""
        number = self._next_number()
        write_trajectories(self._parts, "test", number, trajectories, decode)
        self._write_lines(self._records_path(number), records)

    def add_verdicts(self, records: Sequence[Record]) -> None:
        """Write one more part: stored records that have been judged since."""
        self._write_lines(self._records_path(self._next_number()), records)

    def finish(self, keys: Sequence[str]) -> None:
        """Write `records.jsonl` and `trajectories.parquet`: each question of `keys` once, in that order."""
        # The latest record of each question.
        found = self.records()
        self._write_lines(self.folder / RECORDS, [found[key] for key in keys if key in found])
        paths = [trajectories_path(self._parts, "test", number) for number in self._numbers()]
        tables = [pq.read_table(path) for path in paths if path.exists()]
        if not tables:
            return
        # The latest trajectory of each question, with metrics that were measured after it was stored.
        table = pa.concat_tables(tables)
        latest = {key: row for row, key in enumerate(table.column("group_id").to_pylist())}
        table = _with_metrics(table.take([latest[key] for key in keys if key in latest]), found)
        write_trajectory_table(self.folder / TRAJECTORIES, table)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder atomically."""
        _replace(self.folder / name, text)

    def _compare(self, settings: dict[str, Any]) -> None:
        before = json.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))
        now = json.loads(json.dumps(settings))
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if "judge" in names and same_judge(before["judge"], now["judge"]):
            names.remove("judge")
        if names:
            changes = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
            raise ConfigError(
                f"{self.folder} has an evaluation with other settings: {changes}. Give another --output_dir, or start "
                f"over with --restart, which deletes what is there"
            )

    def _next_number(self) -> int:
        return max(self._numbers(), default=-1) + 1

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("records_")) for path in self._parts.glob("records_*.jsonl"))

    def _records_path(self, number: int) -> Path:
        return self._parts / f"records_{number}.jsonl"

    def _write_lines(self, path: Path, records: Sequence[Record]) -> None:
        _replace(path, "".join(json.dumps(record.to_json(), ensure_ascii=False) + "\n" for record in records))


def same_judge(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Whether verdicts by the judge of settings `before` are those of `now`. Without a judge before, there are none."""
    from search_r1.rewards.judge import CHANGES_NO_VERDICT

    def model_and_rubric(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in CHANGES_NO_VERDICT | {"url"}}

    return before is None or (now is not None and model_and_rubric(before) == model_and_rubric(now))


def _with_metrics(table: pa.Table, records: Mapping[str, Record]) -> pa.Table:
    """The trajectories with all that was measured on them: a verdict comes after the episode was stored."""
    rows = (records[key].metrics for key in table.column("group_id").to_pylist())
    components = [[(name, value) for name, value in metrics.items() if value is not None] for metrics in rows]
    place = table.schema.get_field_index("reward_components")
    field = table.schema.field(place)
    return table.set_column(place, field, pa.array(components, type=field.type))


def read_records(path: Path) -> list[Record]:
    """The records of a file. Raises DataError if it has none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 in a text
        return [Record(**json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} holds no records of an evaluation: {error}; start over with --restart") from error


def _replace(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# Summarise records: means with intervals, by set and over all sets.


def summarize(records: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """`questions` and `failed` counts, `sets`, `macro` and `micro`, for JSON.

    Failed questions are counted, but are in no mean. A metric that applies to no question is left out. A set in which
    confidences are stated has its `calibration`.
    """
    by_set: dict[str, list[Record]] = {}
    for record in records:
        by_set.setdefault(record.set_name, []).append(record)
    values = {}
    for name, rows in by_set.items():
        finished = [[record.metrics.get(metric) for metric in METRICS] for record in rows if not record.failed]
        # float64 [finished questions, metrics]; None becomes NaN
        values[name] = np.array(finished, dtype=np.float64).reshape(len(finished), len(METRICS))
    sets, macro, micro = estimates(values, seed=seed, scores=[list(METRICS).index(name) for name in SCORES])
    return {
        "resamples": NUM_RESAMPLES,
        **_counts(records),
        "sets": {
            name: _counts(rows) | {"metrics": _metrics(sets[name])} | _calibration(rows)
            for name, rows in by_set.items()
        },
        "macro": _metrics(macro),
        "micro": _metrics(micro),
    }


def _calibration(records: Sequence[Record]) -> dict[str, Any]:
    """How well the stated confidences fit what is right: the judge's verdicts where there are any, else exact match."""
    rows = [record.metrics for record in records if not record.failed]
    score = "judge" if any(row.get("judge") is not None for row in rows) else "em"
    stated = [(row["confidence"], row[score]) for row in rows if row.get("confidence") is not None]
    known = [(confidence, right) for confidence, right in stated if confidence is not None and right is not None]
    if not known:
        return {}
    return {"calibration": {"right_by": score} | calibration(*zip(*known, strict=True))}


def _counts(records: Sequence[Record]) -> dict[str, int]:
    return {"questions": len(records), "failed": sum(record.failed for record in records)}


def _metrics(found: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    return {name: asdict(estimate) for name, estimate in zip(METRICS, found, strict=True) if estimate.count}
