"""One real query through the environment that the run names: the question of its first training prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.agent.environment import Environment, checked_outcome
from verl.agent.text import encode_text
from verl.config import Config
from verl.errors import ConfigError, DataError, VerlError
from verl.process.by_name import dotted_name, in_words
from verl.process.event_loop import run_to_end
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_columns import question_of
from verl.trainer.sampling.scoring import Scorer, name_of
from verl.trainer.start_checks.finding import Finding, judge
from verl.trainer.start_checks.prompts import PromptSets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_environment(config: Config, environment: Environment, prompts: PromptSets) -> Finding:
    """Send the query, and close the environment."""
    return run_to_end(_check(config.data.prompt_key, environment, prompts))


def question_in(prompt: Prompt, prompt_key: str) -> str:
    """The question of a row, or the last line of its prompt. Raises DataError."""
    messages, question = prompt.row[prompt_key], question_of(prompt.row)
    if not question and messages:
        question = (messages[-1]["content"] or "").strip().rpartition("\n")[2]
    if not question:
        raise DataError(f"the first training row has neither a question nor a prompt in column {prompt_key!r}")
    return question


async def try_steps(environment: Environment, prompts: PromptSets, tools_started: bool = True) -> list[str]:
    """Call `step` with the environment's example turns for a prompt of each kind: with `example_turn`, in which no tool
    may be used, and with each of `example_turns`, in which tools may, if what is behind the tools has started.

    Returns the turns with their actions, in words. Raises ConfigError, with the place of the row, when a call fails or
    returns no Outcome.
    """
    turns = [(environment.example_turn, False)]
    turns += [(turn, True) for turn in environment.example_turns if tools_started]
    answered: list[str] = []
    for place, prompt, _ in prompts.kinds():
        for turn, tools_allowed in turns:
            try:
                outcome = await environment.step(prompt, turn, tools_allowed)
            except VerlError as error:
                raise type(error)(f"{place}: {error}") from error
            except Exception as error:
                # An environment may be the user's own code, which can raise anything.
                why = f"step of {dotted_name(environment)} raised {in_words(error)}, for the turn {turn!r}"
                raise ConfigError(f"{place}: {why}") from error
            answered.append(f"{turn!r} is {checked_outcome(outcome, environment).action!r}")
    return list(dict.fromkeys(answered))


async def _check(prompt_key: str, environment: Environment, prompts: PromptSets) -> Finding:
    try:
        await environment.check()
        answered = await try_steps(environment, prompts)
        query = question_in(prompts.train.all()[0], prompt_key)
        started = time.perf_counter()
        titles = await environment.probe(query)
        milliseconds = 1000 * (time.perf_counter() - started)
    except VerlError as error:
        return Finding("FAIL", "environment", str(error))
    finally:
        await environment.close()
    tools = f"; tools: {', '.join(environment.tool_names)}" if environment.tool_names else ""
    # None: there is no tool that could be called for real.
    if titles is None:
        return Finding("ok", "environment", f"answers its example turns: {', '.join(answered)}{tools}")
    found = f"{len(titles)} passages for {query!r} in {milliseconds:.0f} ms"
    if titles:
        found += f", the first is {titles[0]!r}"
    found += tools
    return judge(bool(titles), "environment", found, "check that the retriever has the corpus that you want", "warn")


# The reward, tried on real rows with a policy's turns that were made up, before anything is loaded.

WITHOUT_ANSWER = "I do not know."
REWARD_TODO = "check that the reward reads the answer where the policy writes it, and the gold one where the row has it"


class TriedReward(NamedTuple):
    """The scores of made-up turns in words, and what is suspicious about them, if anything."""

    found: str
    suspicious: str | None = None


def try_reward(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, prompts: PromptSets, environment: Environment
) -> TriedReward:
    """Score made-up turns for a prompt of each kind, by the rules of training and of validation: turns without the
    answer, and one with the row's gold answer, written as the environment reads it.

    Suspicious is a gold answer that gets no more than a turn without it. Raises what the rules raise, with the place of
    the row: RewardError, DataError, or RewardUnavailable when a service is down.
    """
    if not getattr(scorer.train, "scores_texts", True):
        return TriedReward(f"{name_of(scorer.train)} takes what each episode gives, so no text can be tried on it")
    given: list[str] = []
    suspicious: str | None = None
    for place, prompt, validate in prompts.kinds():
        gold, scores = gold_answer(prompt.row), dict[str, float]()
        right = None if gold is None else environment.answer_turn(gold)
        # Turns that are equal are tried once. A row without a gold answer has only the other two.
        for turn in filter(None, dict.fromkeys((environment.example_turn, WITHOUT_ANSWER, right))):
            try:
                scores[turn] = _score(scorer, tokenizer, prompt, turn, validate)
            except VerlError as error:
                raise type(error)(f"{place}: {error}") from error
            what = " with the gold answer" if turn == right else ""
            given.append(f"{scores[turn]:g} for {turn!r}{what} ({prompt.data_source})")
        suspicious = suspicious or _suspicious(place, scores, gold, right)
    return TriedReward(f"{name_of(scorer.train)} gave {', '.join(dict.fromkeys(given))}", suspicious)


def _suspicious(place: str, scores: Mapping[str, float], gold: str | None, right: str | None) -> str | None:
    """Whether a turn without the gold answer gets as much as `right`, the one that has it, in words."""
    wrong = {turn: score for turn, score in scores.items() if gold and gold.lower() not in turn.lower()}
    if right is None or not wrong or scores[right] > max(wrong.values()):
        return None
    best = max(wrong, key=wrong.__getitem__)
    return f"{place}: {right!r}, with the gold answer, gets {scores[right]:g}, and {best!r} gets {wrong[best]:g}"


def gold_answer(row: Mapping[str, Any]) -> str | None:
    """The first gold answer of a row, where `reward_model.ground_truth` has it as a text, in a list, or under `target`;
    None if it has another form.
    """
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, Sequence) and not isinstance(truth, str):
        truth = next(iter(truth), None)
    return truth.strip() or None if isinstance(truth, str) else None


def _score(scorer: Scorer, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, turn: str, validate: bool) -> float:
    ids = encode_text(tokenizer, turn)
    segments = [Segment(Source.PROMPT, prompt.ids), Segment(Source.POLICY, ids, (-1.0,) * len(ids))]
    events = [{"turn": 0, "text": turn}]
    made_up = Trajectory("preflight", prompt, segments, Status.TURN_LIMIT, num_turns=1, events=events)
    scorer.try_on([made_up], tokenizer, validate)
    assert made_up.reward is not None
    return made_up.reward
