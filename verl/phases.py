"""The four phases of a step and what is in a device's memory in each: read by the roles, the engines and estimates.

    sample   the engines play episodes
    score    forward passes: log-probs of policy and anchor, values of the critic
    update   forward and backward passes and optimizer steps; the anchor follows
    sync     the policy's weights go to the engines, bucket by bucket

What a phase does not list leaves the device before the phase begins, where it can: gradients and a pass' activations
are freed, the engines sleep (`rollout.free_cache_engine`), and a role's parameters, gradients and optimizer state go to
host memory when their `*_offload` key is set; without it they stay. In `sync` the shards of a policy that is off-loaded
are read from host memory: only the buckets are on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Phase(StrEnum):
    """A part of a step."""

    SAMPLE = "sample"
    SCORE = "score"
    UPDATE = "update"
    SYNC = "sync"


class Part(StrEnum):
    """Something that takes device memory for longer than one pass. The first three are those of a trained role."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ANCHOR = "anchor"
    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "kv cache"
    BUCKETS = "buckets"


RESIDENT: Mapping[Phase, frozenset[Part]] = MappingProxyType(
    {
        Phase.SAMPLE: frozenset({Part.ENGINE_WEIGHTS, Part.KV_CACHE}),
        Phase.SCORE: frozenset({Part.PARAMETERS, Part.ANCHOR}),
        Phase.UPDATE: frozenset({Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER, Part.ANCHOR}),
        Phase.SYNC: frozenset({Part.ENGINE_WEIGHTS, Part.BUCKETS}),
    }
)
