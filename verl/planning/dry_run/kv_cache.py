"""The capacity of an engine's key-value cache: the memory that its weights leave."""

from __future__ import annotations

import copy

from verl.config import Config
from verl.config.rules.placement import TENSOR_PARALLEL, placement_of
from verl.config.rules.predicates import window_of
from verl.engine.files.model_shape import ModelShape
from verl.planning.dry_run.place import GIB, Place

LARGEST_WARM_UP = 4 * GIB  # what vLLM needs beside weights and cache, for its largest iteration


def kv_cache_tokens(config: Config, policy: ModelShape, place: Place) -> int:
    """The tokens that one engine's cache holds; 0 or less: its weights do not fit into its share of a GPU."""
    rollout = config.actor_rollout_ref.rollout
    width = 2 if rollout.dtype in ("bfloat16", "float16") else 4  # auto: the larger is assumed
    per_token = 2 * policy.num_layers * policy.key_width * width
    if not place.on_gpu:
        return int(rollout.kv_cache_gib * GIB // per_token)
    ranks = rollout.tensor_model_parallel_size
    iteration = width * rollout.max_num_batched_tokens * (2 * policy.mlp // ranks + 4 * policy.hidden)
    room = rollout.gpu_memory_utilization * place.memory - width * policy.num_params / ranks
    return int((room - min(iteration, LARGEST_WARM_UP)) * ranks // per_token)


def room_for_sequences(config: Config, policy: ModelShape, place: Place) -> tuple[bool, str]:
    """Whether the longest sequence has room, and a message, which says what to change if it has none."""
    tokens, window = kv_cache_tokens(config, policy, place), window_of(config)
    found = f"an engine has room for {max(tokens, 0)} tokens, a sequence has at most {window}"
    if tokens >= window:
        return True, found
    if not place.on_gpu:
        return False, f"{found}; raise actor_rollout_ref.rollout.kv_cache_gib"
    todo = "raise actor_rollout_ref.rollout.gpu_memory_utilization"
    enough = _enough_ranks(config, policy, place)
    return False, f"{found}; set {TENSOR_PARALLEL}={enough}, or {todo}" if enough else f"{found}; {todo}"


def _enough_ranks(config: Config, policy: ModelShape, place: Place) -> int | None:
    """The fewest GPUs of an engine that give a sequence room; None if no number does."""
    tried, sampling = copy.deepcopy(config), placement_of(config, "cuda").sampling
    for ranks in (ranks for ranks in range(1, sampling + 1) if sampling % ranks == 0):
        tried.actor_rollout_ref.rollout.tensor_model_parallel_size = ranks
        if kv_cache_tokens(tried, policy, place) >= window_of(config):
            return ranks
    return None
