"""What a valid configuration may ask for that this version cannot train yet."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from verl.config.rules.placement import RoleName, num_ranks
from verl.config.rules.validate import ACTOR, ROLLOUT, raise_problems
from verl.config.sections.schema import Config

SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
REFERENCE_SIZE = "actor_rollout_ref.ref.fsdp_config.fsdp_size"


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
    if "mlflow" in config.trainer.logger and find_spec("mlflow") is None:
        yield "trainer.logger=mlflow is not installed: .venv/bin/pip install -e '.[mlflow]'"
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
    yield from _shard_group_problems(config)
    yield from _sequence_parallel_problems(config)


def _shard_group_problems(config: Config) -> Iterator[str]:
    role = config.actor_rollout_ref
    actor, reference = role.actor.fsdp_config.fsdp_size, role.ref.fsdp_config.fsdp_size
    sizes: list[tuple[RoleName, str, int]] = [
        ("actor", f"{ACTOR}.fsdp_config.fsdp_size", actor),
        ("critic", "critic.model.fsdp_config.fsdp_size", config.critic.model.fsdp_config.fsdp_size),
    ]
    for name, key, size in sizes:
        ranks = num_ranks(config, name)
        if size != -1 and (size < 1 or ranks % size):
            yield (
                f"{key}={size} does not divide the {ranks} workers that train the {name}: set it to "
                f"{ranks // config.trainer.nnodes}, the workers of a node, for one copy of the model per node, or to "
                "-1 for one copy over all of them"
            )
    if reference != actor:
        yield (
            f"{REFERENCE_SIZE}={reference} differs from the actor's ({actor}), but the anchor follows the policy "
            "shard by shard; leave it out to use the actor's"
        )


def _sequence_parallel_problems(config: Config) -> Iterator[str]:
    role, critic = config.actor_rollout_ref, config.critic
    size, reference = role.actor.ulysses_sequence_parallel_size, role.ref.ulysses_sequence_parallel_size
    sizes: list[tuple[RoleName, str, int, str, bool]] = [
        ("actor", ACTOR, size, "actor_rollout_ref.model", role.model.use_remove_padding),
        ("critic", "critic", critic.ulysses_sequence_parallel_size, "critic.model", critic.model.use_remove_padding),
    ]
    for name, section, asked, model, packed in sizes:
        key, ranks = f"{section}.{SEQUENCE_PARALLEL}={asked}", num_ranks(config, name)
        if ranks % asked:
            yield (
                f"{key} does not divide the {ranks} workers that train the {name}: set it to a divisor, or to 1 to "
                "turn it off"
            )
        if asked > 1 and not packed:
            yield f"{key} needs {model}.use_remove_padding=True: workers share sequences that are packed into one row"
    if reference != size:
        yield (
            f"actor_rollout_ref.ref.{SEQUENCE_PARALLEL}={reference} differs from the actor's ({size}), but both "
            "read the same slices; leave it out to use the actor's"
        )


def _not_available(key: str, value: object, instead: str) -> str:
    return f"{key}={value} is not available in this version: {instead}"
