"""Relations between the settings of asynchronous RL."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.schema import Config

KEY = "trainer.async_rollout"


def max_staleness(config: Config) -> int:
    """In versions of the weights; 0: a step is sampled with those that it trains."""
    trainer = config.trainer
    if trainer.async_rollout == "off":
        return 0
    return trainer.max_staleness or 1


def asynchronous_problems(config: Config) -> Iterator[str]:
    trainer = config.trainer
    mode, most = trainer.async_rollout, trainer.max_staleness
    if mode == "off":
        if most is not None:
            yield (f"trainer.max_staleness={most} has no effect with {KEY}=off: set {KEY}=bounded, or leave it at null")
        return
    if mode == "one_step_off" and most not in (None, 1):
        yield f"{KEY}=one_step_off is a trainer.max_staleness of 1, not {most}: set {KEY}=bounded, or leave it at null"
    if mode == "bounded" and most is None:
        yield f"{KEY}=bounded needs trainer.max_staleness, the most versions that weights may be behind: 2, say"
    if trainer.layout == "colocated" and trainer.device != "cpu":
        yield (
            f"{KEY}={mode} samples while the step before is trained, and with trainer.layout=colocated both take turns "
            "on the same GPUs: set trainer.layout=split. On CPU engines are processes of their own: with "
            "trainer.device=cpu either layout will do"
        )
    if trainer.deterministic:
        yield (
            f"{KEY}={mode} and trainer.deterministic=True exclude each other: which weights sample a step depends on "
            "how long sampling and training take, and after a resume they are newer ones; leave one of them out"
        )
