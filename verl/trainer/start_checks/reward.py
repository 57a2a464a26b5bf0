"""The reward, tried on real rows with a policy's turn that was made up, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.agent.text import encode_text
from verl.errors import VerlError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.sampling.scoring import Scorer, name_of
from verl.trainer.start_checks.prompts import PromptSets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITHOUT_ANSWER = "I do not know."


def try_reward(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, prompts: PromptSets, example_turn: str = WITHOUT_ANSWER
) -> str:
    """Score made-up turns for a prompt of each kind, by the rules of training and of validation.

    Returns what they gave. Raises what the rules raise, with the place of the row: RewardError, DataError, or
    RewardUnavailable when a service is down.
    """
    turns = dict.fromkeys((example_turn, WITHOUT_ANSWER))
    given: list[str] = []
    for place, prompt, validate in prompts.kinds():
        for turn in turns:
            made_up = _made_up(prompt, encode_text(tokenizer, turn), turn)
            try:
                scorer.try_on([made_up], tokenizer, validate)
            except VerlError as error:
                raise type(error)(f"{place}: {error}") from error
            given.append(f"{made_up.reward:g} for {turn!r} ({prompt.data_source})")
    return f"{name_of(scorer.train)} gave {', '.join(dict.fromkeys(given))}"


def _made_up(prompt: Prompt, ids: tuple[int, ...], turn: str) -> Trajectory:
    """An episode of one turn."""
    segments = [Segment(Source.PROMPT, prompt.ids), Segment(Source.POLICY, ids, (-1.0,) * len(ids))]
    return Trajectory("preflight", prompt, segments, Status.TURN_LIMIT, num_turns=1, events=[{"turn": 0, "text": turn}])
