"""What a valid configuration may ask for that this version cannot train yet."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.placement import num_ranks
from verl.config.schema import Config
from verl.config.validate import ACTOR, ROLLOUT, raise_problems


def check_supported(config: Config) -> None:
    """Raise one ConfigError that lists everything `config` asks for and this version does not have.

    Called before anything heavy is imported. `load_config` accepts these values, as every published command is valid.
    """
    problems = list(_everywhere(config))
    if not config.trainer.val_only:
        problems += _training(config)
    raise_problems(problems)


def _everywhere(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.name != "vllm":
        yield _not_available(f"{ROLLOUT}.name", config.actor_rollout_ref.rollout.name, f"set {ROLLOUT}.name=vllm")
    if config.trainer.del_local_ckpt_after_load:
        yield _not_available("trainer.del_local_ckpt_after_load", True, "leave it at False")
    if config.reward_model.enable:
        yield _not_available("reward_model.enable", True, "use a rule (reward.function)")
    if "mlflow" in config.trainer.logger:
        yield _not_available("trainer.logger", "mlflow", "use console, wandb or tensorboard")
    for name in ("structure_format_score", "final_format_score", "retrieval_score"):
        value = getattr(config.reward_model, name)
        if value:
            yield _not_available(
                f"reward_model.{name}", value, "run .venv/bin/python -m verl.trainer.main_ppo_format, or leave it at 0"
            )


def _training(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if not actor.state_masking:
        yield _not_available(f"{ACTOR}.state_masking", False, "retrieved text is never trained on; leave it at True")
    for key, size in _shard_groups(config):
        if size not in (-1, num_ranks(config)):
            yield _not_available(key, size, "leave it at -1 (all workers)")
    for key, size in _sequence_parallel_sizes(config):
        if size > 1:
            yield _not_available(key, size, "leave it at 1")


def _shard_groups(config: Config) -> Iterator[tuple[str, int]]:
    yield f"{ACTOR}.fsdp_config.fsdp_size", config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    yield "actor_rollout_ref.ref.fsdp_config.fsdp_size", config.actor_rollout_ref.ref.fsdp_config.fsdp_size
    yield "critic.model.fsdp_config.fsdp_size", config.critic.model.fsdp_config.fsdp_size


def _sequence_parallel_sizes(config: Config) -> Iterator[tuple[str, int]]:
    # The reference follows the actor by interpolation, so a user who set one key reads one message.
    actor, reference = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    yield f"{ACTOR}.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size
    if reference.ulysses_sequence_parallel_size != actor.ulysses_sequence_parallel_size:
        yield "actor_rollout_ref.ref.ulysses_sequence_parallel_size", reference.ulysses_sequence_parallel_size
    yield "critic.ulysses_sequence_parallel_size", config.critic.ulysses_sequence_parallel_size


def _not_available(key: str, value: object, instead: str) -> str:
    return f"{key}={value} is not available in this version: {instead}"
