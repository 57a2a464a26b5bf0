"""Settings of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.sections.fields import count, section, setting, share


@dataclass
class ValKwargs:
    """How validation samples: greedy unless do_sample."""

    do_sample: bool = setting(
        False, "Sample in validation; false: greedy decoding, and the three values below are not used."
    )
    temperature: float = setting(
        1.0, "Sampling temperature in validation. vLLM would raise a lower one to 0.01.", ge=0.01
    )
    top_p: float = setting(1.0, "Nucleus probability in validation.", gt=0, le=1)
    top_k: int = setting(-1, "Number of most likely tokens to sample from in validation; -1: all.", ge=-1)


@dataclass
class WeightSyncConfig:
    """How the policy's weights get to the engines."""

    bucket_mib: int = count(
        512, "Size of a bucket of weights sent to the engines, in MiB; a single larger weight is sent whole."
    )
    between_nodes: Literal["auto", "broadcast", "objects"] = setting(
        "auto",
        "How weights reach nodes that only sample. broadcast: sent once to all engines, by NCCL, or by gloo on CPU;"
        " if that fails, by objects. objects: through Ray's object store. auto: broadcast on GPUs, objects on CPU.",
    )

    def is_broadcast(self, device: str) -> bool:
        """Whether nodes that only sample get the weights by broadcast on `device` ("cpu" or "cuda")."""
        return self.between_nodes == "broadcast" or (self.between_nodes == "auto" and device == "cuda")


@dataclass
class LogProbConfig:
    """How large a pass that reads log-probs may be (no influence on the result)."""

    log_prob_micro_batch_size: int = count(
        128, "Maximum number of trajectories per forward pass that computes log-probs, over all workers."
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False,
        "Limit that pass by tokens instead of by trajectories.",
        shown="${actor_rollout_ref.actor.use_dynamic_bsz}",
    )
    log_prob_max_token_len_per_gpu: int = count(
        16384,
        "Maximum number of tokens per worker in that pass.",
        shown="${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
    )


@dataclass
class RolloutConfig(LogProbConfig):
    """Sampling of trajectories, and the inference engine behind it."""

    name: Literal["vllm", "hf"] = setting("vllm", "Rollout engine; only vllm is available.")
    temperature: float = setting(
        1.0,
        "Sampling temperature in training; log-probs are computed from logits divided by it, too. vLLM would raise a "
        "lower one to 0.01.",
        ge=0.01,
    )
    top_k: int = setting(-1, "Number of most likely tokens to sample from in training; -1: all.", ge=-1)
    top_p: float = setting(
        1.0,
        "Nucleus probability in training. The default is 1.0 (Search-R1: 0.95), because below 1 the tokens come "
        "from another distribution than the log-probs in the loss, which biases the update.",
        gt=0,
        le=1,
    )
    prompt_length: int = count(
        512, "Maximum length of the context given to the engine, in tokens.", shown="${data.max_prompt_length}"
    )
    response_length: int = count(
        512, "Maximum number of tokens the engine samples per turn.", shown="${data.max_response_length}"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Number format of the engine's weights and activations; auto: bfloat16 on CUDA, and on a CPU as "
        "fsdp_config.mixed_precision.param_dtype=auto chooses. float32 takes twice the memory. (Search-R1: bfloat16)",
    )
    gpu_memory_utilization: float = setting(0.5, "Share of a GPU's memory that the engine may use.", gt=0, le=1)
    ignore_eos: bool = setting(False, "Continue sampling after the end-of-sequence token (for benchmarks).")
    enforce_eager: bool | None = setting(
        None, "Run without CUDA graphs (Search-R1: true); null: CUDA graphs on CUDA, no compilation on CPU."
    )
    free_cache_engine: bool = setting(True, "Free the engine's GPU memory while the policy is updated.")
    load_format: str | None = setting(
        None,
        "vLLM load format of an engine's initial weights; null: in a run dummy, since the first sync replaces all of "
        "them, and auto elsewhere. (Search-R1: dummy_dtensor, a loader that vLLM no longer has.)",
    )
    tensor_model_parallel_size: int = count(2, "GPUs per engine.")
    max_num_batched_tokens: int = count(8192, "Maximum number of tokens in one engine iteration.")
    max_num_seqs: int = count(1024, "Maximum number of sequences in one engine iteration.")
    do_sample: bool = setting(True, "Has no effect; changing it is an error that says why.")
    n: int = count(1, "Samples per prompt without search (do_search=false); must be 1 with search.")
    n_agent: int = count(1, "Trajectories per prompt (the group size) with search.")
    kv_cache_gib: float = setting(1.0, "Memory of the key-value cache of one engine on CPU, in GiB.", gt=0)
    num_threads: int | None = count(
        None, "CPU threads of each engine on CPU; null: the node's cores minus one, divided by its engines."
    )
    num_engines: int = count(1, "Number of engines on CPU; on GPU it follows from the number of GPUs.")
    nnodes: int = setting(
        0,
        "Number of additional nodes that only sample, with trainer.layout=split; those of trainer.nnodes then only "
        "train.",
        ge=0,
    )
    n_gpus_per_node: int | None = count(None, "GPUs of each of these nodes; null: trainer.n_gpus_per_node.")
    max_nnodes: int | None = count(
        None,
        "Maximum number of these nodes: nodes that join the cluster during the run sample too, up to this number; "
        "null: nnodes.",
    )
    over_sample: float = share(
        0.0,
        "Additional prompts in progress, as a share of data.train_batch_size: 0.5 of 512 makes 768. A step is "
        "trained on the first groups that are complete; the others are interrupted and continue in the next step, "
        "with its weights. 0: a step waits for all of its groups.",
    )
    seed_per_request: bool = setting(
        True, "Seed each turn separately, so that its tokens do not depend on the rest of the batch."
    )
    max_concurrent: int | None = count(
        None,
        "Maximum number of trajectories in progress on one engine; null: as many as fit into its cache at half of "
        "their maximum length.",
    )
    max_restarts: int = setting(2, "How many times in a run an engine that died is restarted.", ge=0)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)
    val_kwargs: ValKwargs = section(ValKwargs)
