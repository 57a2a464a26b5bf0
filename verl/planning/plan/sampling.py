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
from verl.planning.dry_run.device import engine_width, sampled_at_once
from verl.planning.dry_run.machine import COMPUTING, IN_NODE, Cost, Machine
from verl.planning.dry_run.place import Place

STEPPING = "iterations of the engines"
ALL_REDUCES = 2  # of activations, in each layer of an engine of several GPUs


@dataclass(frozen=True)
class Waiting:
    """What takes time beside arithmetic and memory, in seconds: an iteration of vLLM's scheduler and sampler, whatever
    is sampled; a search with its way there and back, beside others; a hop, until the first byte of an all-reduce has
    arrived.
    """

    iteration: float
    search: float
    hop: float


ASSUMED = Waiting(4e-3, 0.3, 8e-6)
NONE = Waiting(0.0, 0.0, 0.0)


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
    """The trajectories of a step that fill a fraction of their window, and of the tokens and searches that they may
    have: each of `max_turns` turns with a search, and a last one without, may have `response_length` tokens.
    """
    searches = config.max_turns if config.do_search else 0
    longest = min((searches + 1) * config.actor_rollout_ref.rollout.response_length, window_of(config))
    window = filled * window_of(config)
    return Trajectories(trajectories_per_step(config), window, filled * longest, longest, filled * searches)


def sampling_cost(
    config: Config, policy: ModelShape, place: Place, machine: Machine, of: Trajectories, waiting: Waiting = ASSUMED
) -> Cost:
    """The cost of the phase in which the engines sample."""
    # How many sequences an engine continues at once.
    found = placement_of(config, place.kind)
    ranks, width = found.gpus_per_engine, engine_width(config, policy.num_params, place.kind)
    limits = sampled_at_once(config, policy, place)
    share = math.ceil(of.number / found.num_engines)
    room = max(1, int(limits.tokens // max(1.0, of.tokens)))
    at_once = min(share, room, limits.limit)

    # An iteration takes the longer of its memory traffic and its arithmetic.
    rate = machine.flops(torch.float32 if width == 4 else torch.bfloat16) * ranks
    memory = machine.memory_bytes * ranks
    keys = 2 * policy.num_layers * policy.key_width * width * of.tokens / 2  # of a sequence that is half there
    computed_params = policy.num_params - policy.num_unused  # of experts, all are read and some are chosen
    moved = (width * policy.num_params + at_once * keys) / memory
    computed = 2 * computed_params * at_once / rate
    sent = _between_gpus(policy, ranks, at_once, width, machine, waiting.hop)

    # All of them, the context that is not generated, and the searches.
    iterations = max(float(of.longest), share * of.generated / at_once)
    context = share * (of.tokens - of.generated) * 2 * computed_params / rate
    computing, stepping = iterations * max(moved, computed) + context, iterations * waiting.iteration
    searching = of.searches * waiting.search * max(1.0, share / at_once)
    parts = {COMPUTING: computing, STEPPING: stepping, IN_NODE: iterations * sent, "searches": searching}
    return Cost(sum(parts.values()), parts)


def _between_gpus(policy: ModelShape, ranks: int, at_once: int, width: int, machine: Machine, hop: float) -> float:
    """The seconds of an iteration in which the GPUs of an engine exchange activations."""
    if ranks == 1:
        return 0.0
    each = hop + 2 * at_once * policy.hidden * width * (ranks - 1) / ranks / machine.link(on_one_node=True)
    return ALL_REDUCES * policy.num_layers * each
