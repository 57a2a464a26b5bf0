"""The time that the engines sample in a step: an arithmetic model of continuous batching, since no engine runs here.

Every iteration of an engine reads its weights and the keys and values of the sequences that it continues, and computes
one token of each; what is not generated (prompts, retrieved text) is computed once, in large pieces. A trajectory waits
for its searches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl.config import Config
from verl.config.rules.placement import placement_of
from verl.config.rules.predicates import trajectories_per_step, window_of
from verl.engine.files.loading import ModelShape
from verl.planning.dry_run.device import kv_cache_tokens
from verl.planning.dry_run.machine import COMPUTING, IN_NODE, Cost, Machine
from verl.planning.dry_run.place import Place

SEARCH_S = 0.3  # a search with its way there and back, beside others
ITERATION_S = 4e-3  # of vLLM's scheduler and sampler, whatever is sampled
STEPPING = "iterations of the engines"
ALL_REDUCES = 2  # of activations, in each layer of an engine of several GPUs
HOP_S = 8e-6  # until the first byte of such an all-reduce has arrived


@dataclass(frozen=True)
class Trajectories:
    """A step's trajectories on average: tokens in all, generated tokens, and searches; `longest`: most tokens generated
    by one.
    """

    number: int
    tokens: float
    generated: float
    longest: int
    searches: float


def expected_trajectories(config: Config, filled: float) -> Trajectories:
    """The trajectories of a step that fill a fraction of their window, and of the tokens and turns that they may
    generate.
    """
    data, turns = config.data, config.max_turns if config.do_search else 1
    longest = min(config.actor_rollout_ref.rollout.response_length, turns * data.max_response_length)
    searches = filled * (turns - 1) if config.do_search else 0.0
    window = filled * window_of(config)
    return Trajectories(trajectories_per_step(config), window, filled * longest, longest, searches)


def sampling_cost(config: Config, policy: ModelShape, place: Place, machine: Machine, of: Trajectories) -> Cost:
    """The cost of the phase in which the engines sample."""
    # How many sequences an engine continues at once.
    found, rollout = placement_of(config, place.kind), config.actor_rollout_ref.rollout
    ranks, width = found.gpus_per_engine, 4 if rollout.dtype == "float32" else 2
    share = math.ceil(of.number / found.num_engines)
    room = max(1, int(kv_cache_tokens(config, policy, place) // max(1.0, of.tokens)))
    at_once = min(share, room, rollout.max_num_seqs)

    # An iteration takes the longer of its memory traffic and its arithmetic.
    rate = machine.flops(torch.float32 if width == 4 else torch.bfloat16) * ranks
    memory = machine.memory_bytes * ranks
    keys = 2 * policy.num_layers * policy.key_width * width * of.tokens / 2  # of a sequence that is half there
    moved = (width * policy.num_params + at_once * keys) / memory
    computed = 2 * policy.num_params * at_once / rate
    sent = _between_gpus(policy, ranks, at_once, width, machine)

    # All of them, the context that is not generated, and the searches.
    iterations = max(float(of.longest), share * of.generated / at_once)
    context = share * (of.tokens - of.generated) * 2 * policy.num_params / rate
    computing, stepping = iterations * max(moved, computed) + context, iterations * ITERATION_S
    waiting = of.searches * SEARCH_S * max(1.0, share / at_once)
    parts = {COMPUTING: computing, STEPPING: stepping, IN_NODE: iterations * sent, "searches": waiting}
    return Cost(sum(parts.values()), parts)


def _between_gpus(policy: ModelShape, ranks: int, at_once: int, width: int, machine: Machine) -> float:
    """The seconds of an iteration in which the GPUs of an engine exchange activations."""
    if ranks == 1:
        return 0.0
    each = HOP_S + 2 * at_once * policy.hidden * width * (ranks - 1) / ranks / machine.link(on_one_node=True)
    return ALL_REDUCES * policy.num_layers * each
