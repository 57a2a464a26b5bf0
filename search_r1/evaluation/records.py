"""The measurements on one question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from search_r1.data.corpus.answer_matching import AnswerMatcher, answer_tokens
from search_r1.data.corpus.gold_questions import searched_answers
from search_r1.evaluation.methods.base import CONTEXT
from search_r1.rewards.metrics import cover_match, exact_match, token_f1
from search_r1.rewards.reading import Reading, read_trajectory
from verl.protocol import Status, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from search_r1.llm_agent.grammar import Grammar

METRICS = {
    "em": "EM",
    "f1": "F1",
    "cover_em": "cover-EM",
    "judge": "judge",
    "searches": "searches",
    "retrieval_recall": "retrieval recall",
    "policy_tokens": "policy tokens",
    "total_tokens": "total tokens",
    "invalid_actions": "invalid actions",
    "finished": "finished",
    "latency_s": "latency (s)",
}
"""Column of a record -> its name in tables."""
SCORES = ("em", "f1", "cover_em", "judge", "retrieval_recall", "finished")
"""The metrics in [0, 1]; if a metric is always 0 or 1, its mean is a share."""


@dataclass(frozen=True)
class Record:
    """One attempt at a question. A metric that does not apply is None; for a FAILED episode, all are.

    `failure` says why there is no finished episode, or no verdict on its answer.

    `retrieval_recall` is 1 if a passage that the model was shown contains a gold answer; it does not apply to questions
    whose answers prove nothing (yes, no), nor to methods without retrieval. `exact_ids`: all token ids are exactly the
    sampled ones. `queries` are the searches that were executed.
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
        context = trajectory.prompt.row.get(CONTEXT)
        shown = reading.passages if context is None else (context, *reading.passages)
        return {
            "em": float(answer is not None and exact_match(answer, golden)),
            "f1": 0.0 if answer is None else token_f1(answer, golden),
            "cover_em": float(answer is not None and cover_match(answer, golden)),
            "judge": None,  # asked for by `judging`, when all have answered
            "searches": float(trajectory.num_searches + (context is not None)),
            "retrieval_recall": recall(shown, golden) if self._retrieves else None,
            "policy_tokens": float(trajectory.num_policy_tokens),
            "total_tokens": float(len(trajectory.ids)),
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
