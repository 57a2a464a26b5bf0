"""Relations between the settings of asynchronous RL."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.rules.predicates import over_samples
from verl.config.sections.schema import Config

KEY = "trainer.async_rollout"
OVER_SAMPLE = "actor_rollout_ref.rollout.over_sample"


def asynchronous_problems(config: Config) -> Iterator[str]:
    trainer = config.trainer
    mode, most = trainer.async_rollout, trainer.max_staleness
    if over_samples(config):
        yield from _over_sample_problems(config)

    # Staleness: with over-sampling, which adds a version of its own, `_over_sample_problems` has said what is wrong.
    if mode == "off":
        if most is not None and not over_samples(config):
            yield (f"trainer.max_staleness={most} has no effect with {KEY}=off: set {KEY}=bounded, or leave it at null")
        return
    if mode == "one_step_off" and most not in (None, 1) and not over_samples(config):
        yield (
            f"{KEY}=one_step_off means trainer.max_staleness=1, not {most}: set {KEY}=bounded, or leave "
            "max_staleness at null"
        )
    if mode == "bounded" and most is None:
        yield (
            f"{KEY}=bounded needs trainer.max_staleness, the maximum number of versions that weights may be "
            "behind: set it to 2, for example"
        )

    # What sampling beside the training cannot go with.
    if trainer.layout == "colocated" and trainer.device != "cpu":
        yield (
            f"{KEY}={mode} samples while the step before is trained, but with trainer.layout=colocated both take "
            "turns on the same GPUs: set trainer.layout=split. (On CPU, engines are separate processes: with "
            "trainer.device=cpu either layout works.)"
        )
    if trainer.deterministic:
        yield (
            f"{KEY}={mode} and trainer.deterministic=True exclude each other: which weights sample a step depends "
            "on the time that sampling and training take, and after a resume the weights are newer; leave one of "
            "them out"
        )


def _over_sample_problems(config: Config) -> Iterator[str]:
    trainer, share = config.trainer, f"{OVER_SAMPLE}={config.actor_rollout_ref.rollout.over_sample:g}"
    if trainer.deterministic:
        yield (
            f"{share} and trainer.deterministic=True exclude each other: which groups are complete first, and "
            "where the others are interrupted, depends on timing; leave one of them out"
        )
    if trainer.async_rollout == "one_step_off" and trainer.max_staleness not in (None, 2):
        yield (
            f"{KEY}=one_step_off with {share} means trainer.max_staleness=2, not {trainer.max_staleness}: set "
            f"{KEY}=bounded, or leave max_staleness at null"
        )
    if trainer.async_rollout == "bounded" and trainer.max_staleness == 1:
        yield (
            f"{KEY}=bounded with {share} needs trainer.max_staleness=2 or more: one version for sampling ahead, "
            "and one for groups that are carried over"
        )
