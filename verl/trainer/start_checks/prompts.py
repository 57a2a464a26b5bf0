"""The prompts as the policy will see them: their length, their template, and one of them token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow.parquet as pq

from verl.agent.environment import Environment
from verl.config import Config
from verl.data.files import file_list
from verl.data.prompts import Curriculum, PromptSource, first_of_each_tags
from verl.errors import ConfigError
from verl.protocol import Prompt
from verl.trainer.start_checks.finding import Finding, judge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_TOKENS = 12  # at each end of a sample


def check_templates(config: Config, environment: Environment) -> Iterator[Finding]:
    """Whether each file was made with the template of the run, as far as the environment's class can tell.

    FAIL if the file tells the policy to use other tags than the run reads, warn for a difference that may be intended.
    """
    todo = "make the file again with the run's template, or set agent.template to the one it was made with"
    data = config.data
    for path in [path for of in (data.train_files, data.val_files, data.test_files) for path in file_list(of or [])]:
        metadata = footer(pq.read_schema(path).metadata)
        found: dict[str, Finding] = {}
        for row, text in first_of_each_tags(_rows(path, data.prompt_key)):
            if problem := environment.check_prompt_file(config, metadata, text):
                level: Literal["warn", "FAIL"] = "FAIL" if problem.contradicts else "warn"
                found.setdefault(level, Finding(level, "template", f"{path}: row {row}: {problem.found}", todo))
        yield from found.values() or [Finding("ok", "template", f"{path}: consistent with the template of this run")]


def _rows(path: Path, prompt_key: str) -> Iterator[tuple[int, Any, Any]]:
    """Number, messages and question of each row of a file that was checked before."""
    file, row = pq.ParquetFile(path), 0
    columns = [name for name in (prompt_key, "question") if name in file.schema_arrow.names]
    for batch in file.iter_batches(columns=columns):
        for values in batch.to_pylist():
            yield row, values[prompt_key], values.get("question")
            row += 1


class PromptSets(NamedTuple):
    """The prompts of a run, from the files that its config names."""

    train: PromptSource
    val: PromptSource
    test: PromptSource | None

    def kinds(self) -> Iterator[tuple[str, Prompt, bool]]:
        """The prompts of `PromptSource.kinds` of each set, with whether they are for validation."""
        for source in self:
            if source is not None:
                yield from ((place, prompt, source is not self.train) for place, prompt in source.kinds())

    def check_ids(self, num_embeddings: int) -> None:
        """Raise DataError for a token that a model with so many embeddings does not have."""
        for source in self:
            if source is not None:
                source.check_ids(num_embeddings)


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, environment: Environment) -> PromptSets:
    """Read the prompts of a run, as its environment writes them.

    Raises DataError for files that cannot be used, ConfigError for fewer training prompts than a step has.
    """
    data = config.data
    curriculum = None
    if data.curriculum.enable:
        probabilities = data.curriculum.keep_probability, data.curriculum.min_keep_probability
        curriculum = Curriculum(*probabilities, min_prompts=data.train_batch_size)
    train = _source(config, tokenizer, environment, data.train_files, data.train_data_num, curriculum)
    require_prompts(config, len(train))  # what is left of them without those that are too long
    val = _source(config, tokenizer, environment, data.val_files, data.val_data_num)
    return PromptSets(train, val, _source(config, tokenizer, environment, data.test_files) if data.test_files else None)


def _source(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment,
    files: str | list[str],
    num_rows: int | None = None,
    curriculum: Curriculum | None = None,
) -> PromptSource:
    data = config.data
    return PromptSource(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        max_start_length=data.max_start_length,
        shuffle=data.shuffle_train_dataloader,
        seed=config.trainer.seed,
        num_rows=num_rows,
        filter_overlong=data.filter_overlong_prompts,
        tags=environment.tags,
        prompt_ids=environment.prompt_ids,
        curriculum=curriculum,
    )


def require_prompts(config: Config, num_prompts: int) -> None:
    """Raise ConfigError when a step would draw the same training prompt twice, as two groups."""
    data = config.data
    if data.train_batch_size <= num_prompts or config.trainer.val_only:
        return
    drawn = "" if data.train_data_num is None else f" (data.train_data_num={data.train_data_num})"
    raise ConfigError(
        f"data.train_batch_size={data.train_batch_size} is more than the {num_prompts} prompts of "
        f"{data.train_files}{drawn}: a step would contain the same prompt several times, as if these were "
        f"different prompts; set it to {num_prompts} or less, or give more prompts"
    )


def footer(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in (metadata or {}).items()}


def check_lengths(config: Config, prompts: PromptSets, window: int | None) -> Iterator[Finding]:
    """The longest prompt of each set of files against what the run allows."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    for files, source in zip((data.train_files, data.val_files, data.test_files), prompts, strict=True):
        if source is None:
            continue
        longest = max(len(prompt.ids) for prompt in source.all())
        found = f"{files}: {len(source)} prompts, the longest has {longest} tokens"
        todo = f"raise data.max_prompt_length (now {data.max_prompt_length}) above it"
        yield judge(longest < data.max_prompt_length, "prompt length", found, todo)
    # Whatever prompts there are, the longest sequence that the settings allow must fit into the model's window.
    longest = rollout.prompt_length + rollout.response_length
    found = f"a sequence has at most {longest} tokens, but the model was made for {window or 'any number'}"
    todo = "lower data.max_prompt_length or data.max_response_length"
    yield judge(window is None or longest <= window, "window", found, todo)


def check_tags(environment: Environment, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Whether the tags that the policy must write survive encoding and decoding, and how many tokens they take."""
    for tag in environment.tags:
        ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found = f"{tag} is {len(ids)} tokens" + ("" if text == tag else f" and is decoded as {text!r}")
        yield judge(text == tag, "tag", found, "use a tokenizer or a template whose tags do not change")


def sample(config: Config, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """A training prompt's ids with their text, the mask 0, and what would follow with which mask."""
    data = config.data
    shown = [(i, ids[i]) for i in range(len(ids)) if i < SHOWN_TOKENS or i >= len(ids) - SHOWN_TOKENS]
    lines = [f"{i:>6} {token:>7}  mask 0  {tokenizer.decode([token])!r}" for i, token in shown]
    if len(ids) > len(shown):
        lines.insert(SHOWN_TOKENS, f"   ... {len(ids) - len(shown)} more with mask 0")
    lines.append(f"{len(ids):>6}     ...  mask 1  up to {data.max_response_length} tokens of the policy's first turn")
    if config.do_search:
        lines.append(f"          ...  mask 0  up to {data.max_obs_length} tokens of its observation; then turns again")
    return "\n".join(lines)
