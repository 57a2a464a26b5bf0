"""Settings of the prompts: files, lengths, batch sizes."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.sections.fields import count, section, setting


@dataclass
class CurriculumConfig:
    """Prompts that were always right or always wrong are drawn less often, from the second epoch on."""

    enable: bool = setting(
        False, "Draw a training prompt less often if its last trajectories, at least two, all had the same reward."
    )
    keep_probability: float = setting(
        0.25,
        "Probability that an epoch draws such a prompt; it is halved each further time in a row that its rewards are "
        "all equal.",
        gt=0,
        le=1,
    )
    min_keep_probability: float = setting(0.05, "Lower limit of this probability.", gt=0, lt=1)


@dataclass
class DataConfig:
    """Prompts for training and validation. Lengths are in tokens, batch sizes in prompts."""

    tokenizer: str | None = setting(
        None, "Folder or hub name of the tokenizer; null: the one in actor_rollout_ref.model.path.", path=True
    )
    train_files: str | list[str] = setting(
        "~/data/rlhf/gsm8k/train.parquet", "Parquet file of training prompts, or a list of them.", path=True
    )
    val_files: str | list[str] = setting(
        "~/data/rlhf/gsm8k/test.parquet", "Parquet file of validation prompts, or a list of them.", path=True
    )
    test_files: str | list[str] | None = setting(
        None, "Parquet file (or list) of held-out prompts, scored before and after training; null: none.", path=True
    )
    train_data_num: int | None = count(None, "Number of training prompts to draw from the files; null: all of them.")
    val_data_num: int | None = count(None, "Number of validation prompts to draw from the files; null: all of them.")
    prompt_key: str = setting("prompt", "Column with the chat messages of a prompt.")
    max_prompt_length: int = count(
        512,
        "Maximum length of the context (prompt, turns and observations) before a turn is sampled, in tokens. In "
        "most frameworks this name means the prompt alone: that is max_start_length.",
    )
    max_response_length: int = count(512, "Maximum number of tokens sampled in one policy turn.")
    max_start_length: int = count(256, "Maximum length of the initial prompt, in tokens.")
    max_obs_length: int = count(
        512,
        "Maximum length of an observation (retrieved passages and their tags), in tokens; a longer one is cut at "
        "its end.",
    )
    train_batch_size: int = count(1024, "Prompts per RL step, before they are repeated n_agent times.")
    val_batch_size: int = count(
        1312,
        "Has no effect; accepted because Search-R1's scripts set it. Validation is one stream of prompts, not batches.",
    )
    return_raw_input_ids: bool = setting(False, "Has no effect; changing it is an error that says why.")
    return_raw_chat: bool = setting(False, "Has no effect; changing it is an error that says why.")
    shuffle_train_dataloader: bool = setting(
        True, "Shuffle the training prompts in each epoch (seeded by trainer.seed)."
    )
    filter_overlong_prompts: bool = setting(
        False, "Drop prompts longer than max_start_length and log how many; false: such a prompt is an error."
    )
    curriculum: CurriculumConfig = section(CurriculumConfig)
