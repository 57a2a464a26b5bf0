"""The typed trees of an RL run, whose defaults are those of configs/ppo_trainer.yaml (a test compares them), and of a
warm start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.sections.actor import ActorRolloutRefConfig
from verl.config.sections.agent import AgentConfig, RetrieverConfig, RewardConfig
from verl.config.sections.algorithm import AlgorithmConfig
from verl.config.sections.critic import CriticConfig, RewardModelConfig
from verl.config.sections.data import DataConfig
from verl.config.sections.fields import count, section, setting, share
from verl.config.sections.model import FsdpConfig, ModelConfig, OptimConfig
from verl.config.sections.trainer import Overwrite, ResumeMode, TrainerConfig


@dataclass
class Config:
    """Everything that defines an RL run."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    agent: AgentConfig = section(AgentConfig)
    reward: RewardConfig = section(RewardConfig)
    retriever: RetrieverConfig = section(RetrieverConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    max_turns: int = setting(
        10, "Maximum number of searches in a trajectory; one more turn without search follows.", ge=0
    )
    do_search: bool = setting(True, "Multi-turn rollouts with the environment; false: a single turn per prompt.")


@dataclass
class SftDataConfig:
    """Rows in Parquet or JSONL: `segments` list<struct<source, text[, ids]>>, or `messages` and `tools` in OpenAI's
    chat schema; optionally `phase` (lm or policy).

    Where segments have ids, they are trained as they are; the tokenizer has to decode them to the text.
    """

    train_files: str | list[str] = setting(
        "data/sft/train.parquet", "Parquet or JSONL (.jsonl) file, or list of them.", path=True
    )
    val_files: str | list[str] | None = setting(
        None,
        "Rows that are held out, of the same kind: the loss on their policy segments is measured, and the model with "
        "the lowest is kept. null: none.",
        path=True,
    )
    train_batch_size: int = count(64, "Rows per step, over all workers.")
    lm_fraction: float = share(
        0.0,
        "Share of the steps, at the start, that draw rows with phase lm and train on every token (but no context); the "
        "later steps draw rows with phase policy and train on policy segments. Without a phase column both draw from "
        "all rows.",
    )
    max_length: int = setting(4096, "Maximum number of tokens in a sequence; a longer one is an error.", ge=2)
    thinking: Literal["template", "tool_cycle", "all"] = setting(
        "template",
        "How long the thinking of a conversation stays in the context. template: as long as the chat template writes "
        "it; tool_cycle: until a user message comes; all: always.",
    )
    apply_chat_template_kwargs: dict[str, Any] = setting(
        {},
        "Variables of the chat template for conversations, such as enable_thinking, or date_string, without which "
        "Llama's template writes today's date.",
    )


@dataclass
class SftTrainerConfig:
    """Settings of the warm start's run: its length, its device, its logs."""

    total_training_steps: int = count(100, "Number of optimizer steps.")
    default_local_dir: str = setting("checkpoints/sft", "Run folder: metrics.jsonl and the model.", path=True)
    overwrite: Overwrite = setting(
        "never",
        "If the run folder holds an earlier run: never refuses to start; archive first moves all of it to "
        "archive/DATE in the folder.",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model runs; auto: cuda if there is a GPU.")
    n_gpus_per_node: int = count(
        1,
        "Workers on this machine, which share each batch: GPUs, or processes with device=cpu. Not read under torchrun.",
    )
    seed: int = setting(0, "Seed for the order of rows.", ge=0)
    num_threads: int | None = count(None, "CPU threads of each worker; null: PyTorch's default.")
    grad_clip: float = setting(1.0, "Maximum gradient norm; a larger gradient is scaled down to it.", gt=0)
    max_token_len_per_gpu: int = count(16384, "Maximum number of tokens per worker in one forward and backward pass.")
    head_chunk_tokens: int | None = count(
        None,
        "Tokens per chunk of the vocabulary projection; null: as many as give 512 MiB of logits on CUDA or 8 MiB on"
        " CPU, at least 64.",
    )
    log_freq: int = count(20, "Steps between two log lines when there is no terminal.")
    save_freq: int = setting(
        -1, "Steps between two checkpoints, from which a run can be resumed; -1: only the model, at the end.", ge=-1
    )
    max_ckpt_to_keep: int | None = count(
        None, "Number of checkpoints to keep, besides the model with the lowest held-out loss; null: all."
    )
    resume_mode: ResumeMode = setting(
        "disable",
        "Whether to resume an earlier run: auto resumes from its newest intact checkpoint, if it has one; "
        "resume_path from resume_from_path.",
    )
    resume_from_path: str | None = setting(None, "For resume_mode=resume_path: .../state/global_step_N.", path=True)
    test_freq: int = setting(
        -1, "Steps between two measurements of the held-out loss; -1: only before and after training.", ge=-1
    )
    patience: int | None = count(
        None,
        "Training ends after so many measurements in a row without a lower held-out loss; null: it does not.",
    )


@dataclass
class SftConfig:
    """All settings of a warm start."""

    model: ModelConfig = section(ModelConfig)
    data: SftDataConfig = section(SftDataConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-3)
    fsdp_config: FsdpConfig = section(FsdpConfig)
    trainer: SftTrainerConfig = section(SftTrainerConfig)
