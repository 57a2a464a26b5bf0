"""Settings of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.fields import section, setting


@dataclass
class ValKwargs:
    """How validation samples: greedy unless do_sample."""

    do_sample: bool = setting(False, "Sample; false: greedy, and the three values below are not used.")
    temperature: float = setting(1.0, "Temperature.", gt=0)
    top_p: float = setting(1.0, "Nucleus probability.", gt=0, le=1)
    top_k: int = setting(-1, "Number of most likely tokens sampled from; -1: all.", ge=-1)


@dataclass
class WeightSyncConfig:
    """How the policy's weights get to the engines."""

    bucket_mib: int = setting(
        512,
        "Weights that go to the engines at once, in MiB; a single weight that is larger goes whole.",
        ge=1,
    )
    between_nodes: Literal["auto", "broadcast", "objects"] = setting(
        "auto",
        "How they get to nodes that only sample. broadcast: sent once to all engines, by NCCL or on CPU by gloo; what "
        "fails goes by objects. objects: through Ray's object store. auto: broadcast on GPUs, objects on CPU.",
    )

    def is_broadcast(self, device: str) -> bool:
        """Whether nodes that only sample get the weights by broadcast on `device` ("cpu" or "cuda")."""
        return self.between_nodes == "broadcast" or (self.between_nodes == "auto" and device == "cuda")


@dataclass
class LogProbConfig:
    """How large a pass that reads log-probs may be (no influence on the result)."""

    log_prob_micro_batch_size: int = setting(
        128, "Most trajectories per forward pass that reads log-probs, over all workers.", ge=1
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False,
        "Bound that pass by tokens instead of by trajectories.",
        shown="${actor_rollout_ref.actor.use_dynamic_bsz}",
    )
    log_prob_max_token_len_per_gpu: int = setting(
        16384,
        "Most tokens per worker in that pass.",
        ge=1,
        shown="${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
    )


@dataclass
class RolloutConfig(LogProbConfig):
    """Sampling of trajectories, and the inference engine behind it."""

    name: Literal["vllm", "hf"] = setting("vllm", "Inference engine; only vllm is available.")
    temperature: float = setting(1.0, "Temperature in training; divides the logits in every log-prob too.", gt=0)
    top_k: int = setting(-1, "Number of most likely tokens sampled from in training; -1: all.", ge=-1)
    top_p: float = setting(
        1.0,
        "Nucleus probability in training. 1.0 here (published: 0.95): below 1 the sampled distribution is not the "
        "one whose log-probs the loss uses, so the update is biased.",
        gt=0,
        le=1,
    )
    prompt_length: int = setting(
        512, "Longest context given to the engine, in tokens.", ge=1, shown="${data.max_prompt_length}"
    )
    response_length: int = setting(
        512, "Most tokens the engine samples per turn.", ge=1, shown="${data.max_response_length}"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "bfloat16", "Format of the engine's weights and activations."
    )
    gpu_memory_utilization: float = setting(0.5, "Share of a GPU's memory the engine may take.", gt=0, le=1)
    ignore_eos: bool = setting(False, "Go on sampling after the end-of-sequence token (for benchmarks).")
    enforce_eager: bool | None = setting(
        None, "Run without CUDA graphs (published: true); null: with them on CUDA, without a compiler on CPU."
    )
    free_cache_engine: bool = setting(True, "Give the engine's GPU memory back while the policy is updated.")
    load_format: str = setting(
        "auto", "vLLM load format of the first weights (published: dummy_dtensor, a loader vLLM no longer has)."
    )
    tensor_model_parallel_size: int = setting(2, "GPUs per engine.", ge=1)
    max_num_batched_tokens: int = setting(8192, "Most tokens in one engine iteration.", ge=1)
    max_num_seqs: int = setting(1024, "Most sequences in one engine iteration.", ge=1)
    do_sample: bool = setting(True, "Has no effect; see the error it gives.")
    n: int = setting(1, "Samples per prompt without search (do_search=false); must be 1 with search.", ge=1)
    n_agent: int = setting(1, "Trajectories per prompt (the group) with search.", ge=1)
    kv_cache_gib: float = setting(1.0, "Memory of the key-value cache of one engine on CPU, in GiB.", gt=0)
    num_threads: int | None = setting(
        None, "CPU threads of each engine on CPU; null: the node's cores but one, by its engines.", ge=1
    )
    num_engines: int = setting(1, "Engines on CPU; on GPU it follows from the number of GPUs.", ge=1)
    nnodes: int = setting(
        0, "Whole nodes that only sample, with trainer.layout=split; those of trainer.nnodes then only train.", ge=0
    )
    n_gpus_per_node: int | None = setting(
        None, "GPUs of each of these nodes; null: as many as trainer.n_gpus_per_node.", ge=1
    )
    max_nnodes: int | None = setting(
        None,
        "Most of these nodes: up to so many, those that join the cluster during the run sample too; null: nnodes.",
        ge=1,
    )
    over_sample: float = setting(
        0.0,
        "Prompts in progress beyond data.train_batch_size, as a share of it: 0.5 of 512 are 768. A step goes on with "
        "the first groups that are complete; the others are interrupted where they are and go on in the next step, "
        "under its weights. 0: a step waits for all of its groups.",
        ge=0,
        le=1,
    )
    seed_per_request: bool = setting(True, "Seed each turn by itself: the same tokens whatever else is in the batch.")
    max_concurrent: int | None = setting(
        None,
        "Most trajectories in progress on one engine; null: as many as its cache holds at half of their window.",
        ge=1,
    )
    max_restarts: int = setting(2, "Times in a run that an engine which died is started anew.", ge=0)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)
    val_kwargs: ValKwargs = section(ValKwargs)
