"""What a trainer has to know of an advantage estimator. Imports no torch: `verl.config` reads it.

A row for each name in `ADVANTAGES`, which refuses to register a name without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Read = Literal["gamma", "lam", "batch_std", "chain"]


@dataclass(frozen=True)
class EstimatorTraits:
    """`reads`: of what can be set (`AdvantageSettings`, the scale "batch_std", `chain_T`), what changes the result.

    needs_critic: it reads values. needs_greedy: it reads the reward of a greedy answer to each prompt.
    compares_group: the trajectories of a prompt are compared with each other, so there have to be several.
    kl_in_reward: where nothing else is set, its rewards are reduced by the KL to the reference, as published.
    """

    reads: frozenset[Read] = frozenset()
    needs_critic: bool = False
    needs_greedy: bool = False
    compares_group: bool = False
    kl_in_reward: bool = False


ESTIMATOR_TRAITS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(frozenset({"gamma", "lam", "chain"}), needs_critic=True, kl_in_reward=True),
    "grpo": EstimatorTraits(frozenset({"batch_std"}), compares_group=True),
    "grpo_turns": EstimatorTraits(frozenset({"batch_std"}), compares_group=True),
    "opo": EstimatorTraits(compares_group=True),
    "reinforce": EstimatorTraits(frozenset({"batch_std"})),
    "reinforce_plus_plus": EstimatorTraits(frozenset({"gamma"})),
    "reinforce_plus_plus_baseline": EstimatorTraits(compares_group=True),
    "remax": EstimatorTraits(needs_greedy=True),
    "rloo": EstimatorTraits(compares_group=True),
}
