"""The prompts of a run, from the files that its config names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from verl.config import Config
from verl.data.prompts import PromptSource
from verl.trainer.preflight.prompts import prompt_source, require_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptSets(NamedTuple):
    train: PromptSource
    val: PromptSource
    test: PromptSource | None


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    """Raises DataError for files that cannot be used, ConfigError for fewer training prompts than a step has."""
    data = config.data
    train = prompt_source(config, tokenizer, data.train_files, data.train_data_num)
    require_prompts(config, len(train))  # what is left of them without those that are too long
    val = prompt_source(config, tokenizer, data.val_files, data.val_data_num)
    return PromptSets(train, val, prompt_source(config, tokenizer, data.test_files) if data.test_files else None)
