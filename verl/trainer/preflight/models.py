"""The models that a run would load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl.config import Config
from verl.config.predicates import anchor_is_base, has_anchor, has_critic
from verl.engine.loading import import_modules
from verl.engine.lora import Lora
from verl.engine.model import CausalLm
from verl.engine.value_model import TokenClassifier
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
    """Raises ConfigError."""
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


def _of(shape: ModelShape) -> str:
    words = _in_words(shape.num_params)
    return f"{words} ({_in_words(shape.num_adapted)} trained)" if shape.num_adapted else words


def _in_words(number: int) -> str:
    """In billions, or in millions where that says more."""
    return f"{number / 1e9:.1f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
