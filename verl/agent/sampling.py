"""The sampling distribution of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from verl.agent.environment import Sampling

if TYPE_CHECKING:
    from verl.config import Config

How = Literal["train", "val", "greedy"]
"""Which distribution to sample from: training, validation, or greedy (always the most likely token)."""


def sampling_of(config: Config, how: How) -> Sampling:
    """The sampling distribution for `how`; validation is greedy unless `val_kwargs.do_sample`."""
    rollout = config.actor_rollout_ref.rollout
    if how == "train":
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, ignore_eos=rollout.ignore_eos)
    validation = rollout.val_kwargs
    if how == "greedy" or not validation.do_sample:
        return Sampling(temperature=0.0)
    return Sampling(validation.temperature, validation.top_p, validation.top_k)
