"""The models that a run would load."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import Config
from verl.config.objective import has_anchor
from verl.engine.loading import import_modules
from verl.trainer.preflight.quantities import count_in_words
from verl.trainer.preflight.shape import ModelShape, model_shape, value_shape


@dataclass(frozen=True)
class Models:
    """Shapes of what a run loads; None for what it does not have."""

    policy: ModelShape
    anchor: ModelShape | None = None
    critic: ModelShape | None = None

    def __str__(self) -> str:
        roles = {"policy": self.policy, "anchor": self.anchor, "critic": self.critic}
        parts = [f"{name} {count_in_words(shape.num_params)}" for name, shape in roles.items() if shape is not None]
        return f"{', '.join(parts)} parameters"


def models_of(config: Config) -> Models:
    """Raises ConfigError."""
    role = config.actor_rollout_ref
    settings = role.model
    import_modules(settings.external_lib)
    policy = model_shape(settings.path, settings.override_config, settings.trust_remote_code)
    if config.trainer.val_only:
        return Models(policy)
    anchor = (
        policy
        if role.ref.path is None
        else model_shape(role.ref.path, settings.override_config, settings.trust_remote_code)
    )
    critic = None
    if config.algorithm.adv_estimator == "gae":
        import_modules(config.critic.model.external_lib)
        model = config.critic.model
        critic = value_shape(model.path, model.override_config, model.trust_remote_code)
    return Models(policy, anchor if has_anchor(config) else None, critic)
