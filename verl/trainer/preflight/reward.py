"""The reward, tried on real rows with a policy's turn that was made up, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.agent.text import encode_text
from verl.config import Config
from verl.data.prompts import encode_prompt
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.preflight.rows import first_rows
from verl.trainer.scoring import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.trainer.preflight.inputs import Sources

WITHOUT_ANSWER = "I do not know."


def try_reward(config: Config, sources: Sources) -> str:
    """Score made-up turns for the first row of each data source, by the rules of training and of validation.

    Returns what they gave. Raises RewardError, and what the rules raise; RewardUnavailable when a service is down.
    """
    data, turns = config.data, dict.fromkeys((sources.environment.example_turn, WITHOUT_ANSWER))
    given: list[str] = []
    for validate, files in ((False, data.train_files), (True, data.val_files), (True, data.test_files)):
        for row in first_rows(files) if files else ():
            for turn in turns:
                made_up = _made_up(row, turn, config, sources.tokenizer)
                sources.scorer.try_on([made_up], sources.tokenizer, validate)
                given.append(f"{made_up.reward:g} for {turn!r} ({made_up.prompt.data_source})")
    return f"{name_of(sources.scorer.train)} gave {', '.join(dict.fromkeys(given))}"


def _made_up(row: dict[str, Any], turn: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """An episode of one turn."""
    prompt = Prompt(tuple(encode_prompt(tokenizer, row[config.data.prompt_key])), row["data_source"], row)
    ids = encode_text(tokenizer, turn)
    segments = [Segment(Source.PROMPT, prompt.ids), Segment(Source.POLICY, ids, (-1.0,) * len(ids))]
    return Trajectory("preflight", prompt, segments, Status.TURN_LIMIT, num_turns=1, events=[{"turn": 0, "text": turn}])
