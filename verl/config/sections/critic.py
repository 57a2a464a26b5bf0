"""Settings of the critic (value model) and of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.sections.fields import count, section, setting, share
from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig, ModelConfig, OptimConfig, Strategy


@dataclass
class CriticModelConfig(ModelConfig):
    """The value model: a language model with one output per token. With adapters, the output layer is trained too."""

    external_lib: str | list[str] | None = setting(
        None,
        "Python module, or list of modules, to import before the model is created.",
        shown="${actor_rollout_ref.model.external_lib}",
    )
    trust_remote_code: bool = setting(
        False,
        "Run Python code from the model's folder or repository.",
        shown="${actor_rollout_ref.model.trust_remote_code}",
    )
    use_liger: bool | None = setting(
        None,
        "Compute norms, SwiGLU MLPs and rotary embeddings by Liger's fused kernels.",
        shown="${actor_rollout_ref.model.use_liger}",
    )
    tokenizer_path: str = setting(
        "~/models/deepseek-llm-7b-chat",
        "Folder or hub name of the tokenizer.",
        path=True,
        shown="${actor_rollout_ref.model.path}",
    )
    fsdp_config: FsdpConfig = section(FsdpConfig)


@dataclass
class CriticConfig:
    """The value update. Batch sizes count trajectories over all workers."""

    n_gpus_per_node: int | None = count(
        None,
        "GPUs of each node, out of trainer.n_gpus_per_node, that are reserved for the critic, which then works at "
        "the same time as the actor. null: critic and actor take turns on the same GPUs.",
    )
    strategy: Strategy = setting("fsdp", "How the model is sharded; only fsdp is available.")
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    model: CriticModelConfig = section(CriticModelConfig)
    ppo_mini_batch_size: int = count(
        256,
        "Trajectories per optimizer step, over all workers.",
        shown="${actor_rollout_ref.actor.ppo_mini_batch_size}",
    )
    ppo_micro_batch_size: int = count(64, "Maximum number of trajectories per forward and backward pass.")
    forward_micro_batch_size: int = count(
        64, "Maximum number of trajectories per forward pass.", shown="${critic.ppo_micro_batch_size}"
    )
    use_dynamic_bsz: bool = setting(
        False,
        "Limit a pass by tokens instead of by trajectories.",
        shown="${actor_rollout_ref.actor.use_dynamic_bsz}",
    )
    ppo_max_token_len_per_gpu: int = count(
        32768, "Maximum number of tokens per worker in one forward and backward pass."
    )
    forward_max_token_len_per_gpu: int = count(
        32768, "Maximum number of tokens per worker in one forward pass.", shown="${critic.ppo_max_token_len_per_gpu}"
    )
    ulysses_sequence_parallel_size: int = count(
        1,
        "Number of workers that share each sequence, each with a slice of its tokens (Ulysses). Must divide the "
        "number of workers and of the model's attention heads (docs/models.md#long-contexts).",
    )
    ppo_epochs: int = count(
        1, "Number of passes over the trajectories of a step.", shown="${actor_rollout_ref.actor.ppo_epochs}"
    )
    shuffle: bool = setting(False, "Shuffle the mini-batches of a pass.", shown="${actor_rollout_ref.actor.shuffle}")
    grad_clip: float = setting(1.0, "Maximum gradient norm; a larger gradient is scaled down to it.", gt=0)
    cliprange_value: float = setting(0.5, "Clip range of the value around its old value.", gt=0)


@dataclass
class RewardModelNetConfig:
    """The network of a reward model."""

    input_tokenizer: str | None = setting(
        "~/models/deepseek-llm-7b-chat",
        "Tokenizer of the policy's text; null: that of the reward model.",
        path=True,
        shown="${actor_rollout_ref.model.path}",
    )
    path: str = setting("~/models/FsfairX-LLaMA3-RM-v0.1", "Folder or hub name of the reward model.", path=True)
    external_lib: str | list[str] | None = setting(
        None,
        "Python module, or list of modules, to import before the model is created.",
        shown="${actor_rollout_ref.model.external_lib}",
    )
    use_remove_padding: bool = setting(False, "Pack sequences without padding if the attention kernel supports it.")
    fsdp_config: FrozenFsdpConfig = section(FrozenFsdpConfig)


@dataclass
class RewardModelConfig:
    """A learned reward, and the coefficients of the format reward (main_ppo_format)."""

    enable: bool = setting(False, "Must be false: scoring with a reward model is not available; use reward.function.")
    strategy: Strategy = setting("fsdp", "How the model is sharded; only fsdp is available.")
    model: RewardModelNetConfig = section(RewardModelNetConfig)
    micro_batch_size: int = count(64, "Maximum number of trajectories per forward pass.")
    max_length: int | None = count(None, "Maximum length of the text to score, in tokens; null: no limit.")
    ulysses_sequence_parallel_size: int = count(1, "Number of workers that share each sequence.")
    use_dynamic_bsz: bool = setting(
        False, "Limit a pass by tokens instead of by trajectories.", shown="${critic.use_dynamic_bsz}"
    )
    forward_max_token_len_per_gpu: int = count(
        32768, "Maximum number of tokens per worker in one pass.", shown="${critic.forward_max_token_len_per_gpu}"
    )
    structure_format_score: float = share(0.0, "Reward of a well-formed trajectory with a wrong answer.")
    final_format_score: float = share(0.0, "Reward of a malformed trajectory that has an answer.")
    retrieval_score: float = share(0.0, "Additional reward if a retrieved passage contains the answer.")
