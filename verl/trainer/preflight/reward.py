"""The reward, tried on real rows with a policy's turn that was made up, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl.agent.text import encode_text
from verl.config import Config
from verl.data.files import file_list, read_table
from verl.data.prompts import encode_prompt
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.scoring import Scorer, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN = "I do not know."


def try_reward(config: Config, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> str:
    """Score one turn for the first row of each data source, by the rules of training and of validation.

    Returns what they gave. Raises RewardError, and what the rules raise; RewardUnavailable when a service is down.
    """
    data, given = config.data, []
    for validate, files in ((False, data.train_files), (True, data.val_files), (True, data.test_files)):
        if files:
            tried = [_made_up(row, config, tokenizer) for row in _first_rows(files)]
            scorer.try_on(tried, tokenizer, validate)
            given += [f"{t.reward:g} ({t.prompt.data_source})" for t in tried]
    return f"{name_of(scorer.train)} gave {', '.join(dict.fromkeys(given))} for {TURN!r}"


def _first_rows(files: str | list[str]) -> Iterator[dict[str, Any]]:
    """Of each data source."""
    seen = set()
    for path in file_list(files):
        table = read_table(path, required=("data_source", "reward_model"))
        for number, source in enumerate(table.column("data_source").to_pylist()):
            if source not in seen:
                seen.add(source)
                yield table.slice(number, 1).to_pylist()[0]


def _made_up(row: dict[str, Any], config: Config, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """An episode of one turn."""
    prompt = Prompt(tuple(encode_prompt(tokenizer, row[config.data.prompt_key])), row["data_source"], row)
    ids = encode_text(tokenizer, TURN)
    segments = [Segment(Source.PROMPT, prompt.ids), Segment(Source.POLICY, ids, (-1.0,) * len(ids))]
    event = {"turn": 0, "text": TURN, "action": "invalid", "valid": False}
    return Trajectory("preflight", prompt, segments, Status.TURN_LIMIT, num_turns=1, events=[event])
