"""Memory of the sampler (vLLM): its weights, its share of a GPU, and the tokens that its cache holds."""

from __future__ import annotations

from verl.config import Config
from verl.trainer.preflight.quantities import FLOAT32, GIB, Place
from verl.trainer.preflight.shape import ModelShape

LARGEST_WARM_UP = 4 * GIB  # what a sampler needs beside weights and cache, for its largest iteration


def sampler_parts(config: Config, policy: ModelShape, place: Place) -> dict[str, float]:
    """The whole of vLLM's share; `kv_cache_tokens` says whether that holds the weights and some cache."""
    rollout = config.actor_rollout_ref.rollout
    if place.on_gpu:
        return {"sampler": rollout.gpu_memory_utilization * place.device_bytes}
    return {"sampler weights": float(sampler_bytes(config, policy)), "KV cache": rollout.kv_cache_gib * GIB}


def sampler_bytes(config: Config, policy: ModelShape) -> int:
    """Of the whole weights in the sampler's format."""
    return _value_bytes(config) * policy.num_params


def kv_bytes_per_token(config: Config, policy: ModelShape) -> int:
    """Keys and values of one token in all layers, over all GPUs of an engine."""
    return 2 * policy.num_layers * policy.key_width * _value_bytes(config)


def kv_cache_tokens(config: Config, policy: ModelShape, place: Place) -> int:
    """Tokens that the cache of one engine holds; 0 or less: the sampler does not fit into its share."""
    rollout = config.actor_rollout_ref.rollout
    if not place.on_gpu:
        return int(rollout.kv_cache_gib * GIB // kv_bytes_per_token(config, policy))
    ranks = rollout.tensor_model_parallel_size
    widest = 2 * policy.mlp // ranks + 4 * policy.hidden
    iteration = _value_bytes(config) * rollout.max_num_batched_tokens * widest
    room = rollout.gpu_memory_utilization * place.device_bytes - sampler_bytes(config, policy) / ranks
    return int((room - min(iteration, LARGEST_WARM_UP)) * ranks // kv_bytes_per_token(config, policy))


def _value_bytes(config: Config) -> int:
    """Of a weight; "auto" is the model's own format, of which the larger one is assumed."""
    return 2 if config.actor_rollout_ref.rollout.dtype in ("bfloat16", "float16") else FLOAT32
