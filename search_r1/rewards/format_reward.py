"""Exact match plus credit for keeping the format: the format reward of Search-R1 v0.3 (`qa_em_format`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from search_r1.llm_agent.grammar import TAGS, special_tokens
from search_r1.rewards.exact_match import exact_match, extract_trajectory_answer, gold_answers
from search_r1.rewards.format_grammar import Reply, Turn, check_format
from search_r1.rewards.normalize import normalize_answer
from verl.agent.text import decode_turn
from verl.protocol import Source, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FormatReward:
    """The table, with s = `structure_format_score`, f = `final_format_score`, r = `retrieval_score`:

    | answer  | format kept                  | format broken |
    |---------|------------------------------|---------------|
    | correct | 1                            | 1 - s         |
    | wrong   | s, or s + r                  | f             |
    | none    | s, or s + r (cannot happen)  | 0             |

    r is added when a retrieved passage has a gold answer in it. An answer is what the policy wrote, never an example in
    the prompt. With all three 0 the reward is exact match. Raises `ValueError` for scores outside [0, 1], and for
    s + r > 1: a wrong answer would be worth more than a correct one.
    """

    def __init__(
        self, structure_format_score: float = 0.0, final_format_score: float = 0.0, retrieval_score: float = 0.0
    ) -> None:
        scores = {
            "structure_format_score": structure_format_score,
            "final_format_score": final_format_score,
            "retrieval_score": retrieval_score,
        }
        for name, value in scores.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}: give a number from 0 to 1, the reward of a correct answer")
        if structure_format_score + retrieval_score > 1.0:
            raise ValueError(
                f"structure_format_score {structure_format_score} + retrieval_score {retrieval_score} is above 1, "
                f"the reward of a correct answer: lower one of them"
            )
        self.structure_format_score = structure_format_score
        self.final_format_score = final_format_score
        self.retrieval_score = retrieval_score

    def score(self, trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> tuple[float, dict[str, float]]:
        """(reward, components `exact_match`, `has_answer`, `valid_format`, `retrieval_correct`), components 0 or 1.

        `retrieval_correct` is 0 where the format is broken. Raises `DataError` for a row without gold answers.
        """
        targets = gold_answers(trajectory.prompt)
        answer = extract_trajectory_answer(trajectory, tokenizer)
        matched = answer is not None and exact_match(answer, targets)
        valid = check_format(read_turns(trajectory, tokenizer)).valid
        retrieved = valid and retrieval_correct(trajectory, tokenizer, targets)
        return self._reward(answer is not None, matched, valid, retrieved), {
            "exact_match": float(matched),
            "has_answer": float(answer is not None),
            "valid_format": float(valid),
            "retrieval_correct": float(retrieved),
        }

    def _reward(self, has_answer: bool, matched: bool, valid: bool, retrieved: bool) -> float:
        if matched:
            return 1.0 if valid else 1.0 - self.structure_format_score
        if valid:
            return self.structure_format_score + (self.retrieval_score if retrieved else 0.0)
        return self.final_format_score if has_answer else 0.0


def read_turns(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    """The policy's turns for `check_format`. A reply is an observation if the turn's event is an executed search."""
    turns: list[Turn] = []
    control = set(special_tokens(tokenizer)) - set(TAGS)  # tags may be special tokens, and stay
    for segment in trajectory.segments:
        if segment.source is Source.POLICY:
            turns.append(Turn(decode_turn(tokenizer, _without_end(segment.ids, control, tokenizer))))
        elif segment.source is Source.ENVIRONMENT:
            if not turns or turns[-1].reply is not Reply.NONE:
                turns.append(Turn(""))  # a turn in which no token was sampled has an event, but no segment
            turns[-1] = replace(turns[-1], reply=_kind_of_reply(trajectory, len(turns) - 1))
    return turns


def retrieval_correct(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, targets: Sequence[str]) -> bool:
    """Whether a gold answer is part of a reply of the environment, both after `normalize_answer`.

    Meant for a trajectory of valid format, in which every reply is an observation. A gold answer that normalises to
    nothing (the grade "A") is never found: it would be part of any text.
    """
    golds = [gold for gold in map(normalize_answer, targets) if gold]
    replies = (s.ids for s in trajectory.segments if s.source is Source.ENVIRONMENT)
    bodies = (normalize_answer(_without_frame(decode_turn(tokenizer, ids))) for ids in replies)
    return any(gold in body for body in bodies for gold in golds)


def _kind_of_reply(trajectory: Trajectory, turn: int) -> Reply:
    return Reply.OBSERVATION if trajectory.events[turn].get("executed") else Reply.FEEDBACK


def _without_end(ids: Sequence[int], control: set[str], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Without the control tokens that end it: they say that a turn is over."""
    end = len(ids)
    while end and tokenizer.convert_ids_to_tokens(ids[end - 1]) in control:
        end -= 1
    return ids[:end]


def _without_frame(observation: str) -> str:
    """The passages alone: the word "information" in the tags is no answer to "what did they exchange?"."""
    return observation.strip().removeprefix("<information>").removesuffix("</information>")
