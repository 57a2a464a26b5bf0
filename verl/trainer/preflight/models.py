"""The models that a run would load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl.config import Config
from verl.config.predicates import anchor_is_base, has_anchor, has_critic
from verl.engine.loading import import_modules
from verl.engine.lora import Lora
from verl.engine.model import CausalLm
from verl.engine.value_model import TokenClassifier
from verl.errors import ConfigError
from verl.trainer.model_shape import CPU, ModelShape, model_shape, policy_shape


@dataclass(frozen=True)
class Models:
    """Shapes of what a run loads; None for what it does not have, such as an anchor that is the policy's base."""

    policy: ModelShape
    anchor: ModelShape | None = None
    critic: ModelShape | None = None

    def __str__(self) -> str:
        roles = {"policy": self.policy, "anchor": self.anchor, "critic": self.critic}
        parts = [f"{name} {_of(shape)}" for name, shape in roles.items() if shape is not None]
        return f"{', '.join(parts)} parameters"


def models_of(config: Config) -> Models:
    """Raises ConfigError, also for a model whose attention heads its workers cannot share equally."""
    models = _models_of(config)
    _require_workers_share_heads(config, models)
    return models


def _models_of(config: Config) -> Models:
    role = config.actor_rollout_ref
    settings = role.model
    policy = policy_shape(config)
    if config.trainer.val_only:
        return Models(policy)
    anchor = (
        replace(policy, num_adapted=0)
        if role.ref.path is None
        else model_shape(CausalLm.of(role.ref.path, settings, CPU))
    )
    critic = None
    if has_critic(config):
        import_modules(config.critic.model.external_lib)
        model = config.critic.model
        critic = model_shape(TokenClassifier.of(model.path, model, CPU), Lora.from_config(model))
    own_anchor = has_anchor(config) and not anchor_is_base(config)
    return Models(policy, anchor if own_anchor else None, critic)


def require_engines_share_heads(config: Config, policy: ModelShape) -> None:
    """Raise ConfigError for what vLLM on GPUs would refuse when it loads; on a CPU an engine is one process."""
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    _require_divisor(key, size, policy)
    if max(size, policy.num_key_heads) % min(size, policy.num_key_heads):
        raise ConfigError(
            f"{key}={size} is neither a divisor nor a multiple of the {policy.num_key_heads} key and value heads "
            "of the model, which are divided equally among the GPUs of an engine; set it to one"
        )


def _require_workers_share_heads(config: Config, models: Models) -> None:
    """Raise ConfigError for what the trainer's engines would refuse when they load."""
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    _require_divisor("actor_rollout_ref.actor.ulysses_sequence_parallel_size", size, models.policy)
    if models.critic is not None:
        size = config.critic.ulysses_sequence_parallel_size
        _require_divisor("critic.ulysses_sequence_parallel_size", size, models.critic)


def _require_divisor(key: str, size: int, shape: ModelShape) -> None:
    if shape.num_heads % size:
        divisors = ", ".join(str(number) for number in range(1, shape.num_heads + 1) if shape.num_heads % number == 0)
        raise ConfigError(
            f"{key}={size} does not divide the {shape.num_heads} attention heads of the model; "
            f"set it to one of {divisors}"
        )


def _of(shape: ModelShape) -> str:
    words = _in_words(shape.num_params)
    return f"{words} ({_in_words(shape.num_adapted)} trained)" if shape.num_adapted else words


def _in_words(number: int) -> str:
    """In billions, or in millions where that says more."""
    return f"{number / 1e9:.1f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
