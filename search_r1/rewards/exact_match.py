"""Exact match of the policy's answer with any of the gold answers (spec name: `qa_em`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from search_r1.rewards.normalize import normalize_answer
from verl.agent.text import policy_texts
from verl.errors import DataError
from verl.protocol import Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(response_text: str) -> str | None:
    """The content of the last complete answer tag pair, stripped.

    `response_text` is what the policy wrote: prompts and retrieved pages may have answer tags of their own.
    """
    answers = _ANSWER.findall(response_text)
    return str(answers[-1]).strip() if answers else None


def extract_trajectory_answer(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The last answer in any of the policy's turns; a tag pair never reaches across turns."""
    answers = [extract_answer(text) for text in policy_texts(trajectory, tokenizer)]
    return next((answer for answer in reversed(answers) if answer is not None), None)


def exact_match(prediction: str, targets: Sequence[str]) -> bool:
    """Whether a target equals the prediction after `normalize_answer`.

    A target that normalises to nothing (the grade "A", "The The") is compared by its letters alone instead, so that an
    empty prediction does not match it.
    """
    return any(_same(prediction, target) for target in targets)


def _same(prediction: str, target: str) -> bool:
    normalized = normalize_answer(target)
    if normalized:
        return normalize_answer(prediction) == normalized
    return bool(target.strip()) and prediction.strip().lower() == target.strip().lower()


class ExactMatchReward:
    """1 for an exact match, `wrong_answer_score` for another complete answer, 0 without an answer."""

    def __init__(self, wrong_answer_score: float = 0.0) -> None:
        self.wrong_answer_score = wrong_answer_score

    def score(self, trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> tuple[float, dict[str, float]]:
        """(reward, components `exact_match` and `has_answer`). Raises `DataError` for a row without gold answers."""
        targets = gold_answers(trajectory.prompt)
        answer = extract_trajectory_answer(trajectory, tokenizer)
        if answer is None:
            return 0.0, {"exact_match": 0.0, "has_answer": 0.0}
        matched = exact_match(answer, targets)
        return 1.0 if matched else self.wrong_answer_score, {"exact_match": float(matched), "has_answer": 1.0}


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
