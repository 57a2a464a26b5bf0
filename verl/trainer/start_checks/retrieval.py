"""One real query through the environment that the run names: the question of its first training prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from verl.agent.environment import Environment, Outcome
from verl.agent.text import encode_text
from verl.config import Config
from verl.errors import ConfigError, DataError, VerlError
from verl.process.by_name import dotted_name, in_words
from verl.process.event_loop import run_to_end
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.trajectory_rows import question_of
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


async def try_steps(environment: Environment, prompts: PromptSets) -> None:
    """Call `step` with the environment's example turn, in which no tool may be used, for a prompt of each kind. Raises
    ConfigError, with the place of the row, when that fails or returns no Outcome.
    """
    for place, prompt, _ in prompts.kinds():
        try:
            outcome = await environment.step(prompt, environment.example_turn, False)
        except VerlError as error:
            raise type(error)(f"{place}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{place}: step of {dotted_name(environment)} raised {in_words(error)}") from error
        if not isinstance(outcome, Outcome):
            raise ConfigError(f"step of {dotted_name(environment)} gave {outcome!r}, which is not an Outcome")


async def _check(prompt_key: str, environment: Environment, prompts: PromptSets) -> Finding:
    try:
        await environment.check()
        await try_steps(environment, prompts)
        query = question_in(prompts.train.all()[0], prompt_key)
        started = time.perf_counter()
        titles = await environment.probe(query)
        milliseconds = 1000 * (time.perf_counter() - started)
    except VerlError as error:
        return Finding("FAIL", "environment", str(error))
    finally:
        await environment.close()
    if titles is None:
        return Finding("ok", "environment", "answers a turn; it has no tool to try in this run")
    found = f"{len(titles)} passages for {query!r} in {milliseconds:.0f} ms"
    if titles:
        found += f", the first is {titles[0]!r}"
    return judge(bool(titles), "environment", found, "check that the retriever has the corpus that you want", "warn")


# The reward, tried on real rows with a policy's turn that was made up, before anything is loaded.

WITHOUT_ANSWER = "I do not know."


def try_reward(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, prompts: PromptSets, example_turn: str = WITHOUT_ANSWER
) -> str:
    """Score made-up turns for a prompt of each kind, by the rules of training and of validation.

    Returns the scores in words. Raises what the rules raise, with the place of the row: RewardError, DataError, or
    RewardUnavailable when a service is down.
    """
    turns = dict.fromkeys((example_turn, WITHOUT_ANSWER))
    given: list[str] = []
    for place, prompt, validate in prompts.kinds():
        for turn in turns:
            ids = encode_text(tokenizer, turn)
            segments = [Segment(Source.PROMPT, prompt.ids), Segment(Source.POLICY, ids, (-1.0,) * len(ids))]
            events = [{"turn": 0, "text": turn}]
            made_up = Trajectory("preflight", prompt, segments, Status.TURN_LIMIT, num_turns=1, events=events)
            try:
                scorer.try_on([made_up], tokenizer, validate)
            except VerlError as error:
                raise type(error)(f"{place}: {error}") from error
            given.append(f"{made_up.reward:g} for {turn!r} ({prompt.data_source})")
    return f"{name_of(scorer.train)} gave {', '.join(dict.fromkeys(given))}"
