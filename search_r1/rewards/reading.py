"""The input of a reward: a trajectory as text and its gold answers, read once for all components."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.transcript import Reply, Turn, final_answer, read_turns
from verl.errors import DataError
from verl.protocol import Prompt, Status, Trajectory, searches_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Reading:
    """The input of a reward. `answer` is the policy's last one by the grammar; `targets` are the gold answers."""

    turns: tuple[Turn, ...]
    answer: str | None
    targets: tuple[str, ...]
    question: str
    grammar: Grammar = SEARCH_R1
    status: Status | None = None

    @property
    def queries(self) -> tuple[str, ...]:
        """The queries of the executed searches, in order."""
        return tuple(query for turn in self.turns for query in turn.queries)

    @property
    def passages(self) -> tuple[str, ...]:
        """The results of the searches, one text for each search."""
        return tuple(turn.observation for turn in self.turns if turn.reply is Reply.OBSERVATION)


def read_trajectory(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, grammar: Grammar = SEARCH_R1
) -> Reading:
    """The `Reading` of a trajectory. Raises `DataError` for a row without gold answers."""
    turns = read_turns(trajectory, tokenizer, grammar)
    return Reading(
        turns=tuple(turns),
        answer=final_answer(turns, grammar),
        targets=tuple(gold_answers(trajectory.prompt)),
        question=question_of(trajectory.prompt),
        grammar=grammar,
        status=trajectory.status,
    )


def gold_answers(prompt: Prompt) -> list[str]:
    """`reward_model.ground_truth.target` of the row, one text or a list. Raises `DataError` if there is none."""
    try:
        target = prompt.row["reward_model"]["ground_truth"]["target"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{prompt.data_source}: a row has no reward_model.ground_truth.target") from error
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets or not all(isinstance(text, str) for text in targets):
        raise DataError(
            f"{prompt.data_source}: reward_model.ground_truth.target={target!r} is neither a text nor texts"
        )
    return targets


def evidence_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of the documents that the answer follows from: `evidence` of the row, or of its `metadata` (an object, or
    JSON text of one as in prompt files), a list of texts or whole numbers.

    () if it names none: what else a set calls its evidence, such as the sentences of a paragraph, is not about
    documents.
    """
    ids = row.get("evidence") or as_object(row.get("metadata")).get("evidence")
    if not isinstance(ids, list | tuple) or not all(type(one) in (str, int) for one in ids):
        return ()
    return tuple(dict.fromkeys(map(str, ids)))


def as_object(value: Any) -> Mapping[str, Any]:
    """An object, or JSON text of one, as the column `metadata` of a prompt file; {} for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def documents_found(event: Mapping[str, Any]) -> list[str]:
    """The ids of the documents that the searches of a turn found."""
    return [str(one) for search in searches_of(event) for one in search.get("document_ids") or ()]


def question_of(prompt: Prompt) -> str:
    """The row's `question`, else the last message of its `prompt`, else ""."""
    question = prompt.row.get("question")
    if isinstance(question, str):
        return question
    messages = prompt.row.get("prompt") or [{}]
    return str(messages[-1].get("content", ""))
