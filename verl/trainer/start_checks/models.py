"""The models that a run would load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl.agent.environment import Environment
from verl.agent.text import encode_text
from verl.config import Config
from verl.config.rules.predicates import anchor_is_base, has_anchor, has_critic
from verl.engine.files.loading import CPU, ModelShape, import_modules, model_shape, policy_shape, trained_shape
from verl.engine.files.saving import save_as_a_test
from verl.engine.files.weight_files import WeightFiles, weight_files
from verl.engine.hf_model import HfModel
from verl.engine.model import CausalLm, TokenClassifier
from verl.errors import CheckpointError, ConfigError
from verl.pretrained import load_critic_tokenizer
from verl.trainer.start_checks.prompts import PromptSets

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run loads; None for one that it does not have, such as an anchor that is the
    policy's base.
    """

    policy: ModelShape
    anchor: ModelShape | None = None
    critic: ModelShape | None = None

    def loaded(self) -> dict[str, ModelShape]:
        roles = {"policy": self.policy, "anchor": self.anchor, "critic": self.critic}
        return {name: shape for name, shape in roles.items() if shape is not None}

    def __str__(self) -> str:
        parts = []
        for name, shape in self.loaded().items():
            all_are = not shape.num_adapted and not shape.num_frozen
            trained = "" if all_are else f" ({_in_words(shape.num_trained)} trained)"
            parts.append(f"{name} {_in_words(shape.num_params)}{trained}")
        return f"{', '.join(parts)} parameters"


def models_of(config: Config) -> Models:
    """The models that a run loads. Raises ConfigError, also for one whose attention heads its workers cannot share
    equally.
    """
    models = _models_of(config)
    _require_workers_share_heads(config, models)
    return models


def _models_of(config: Config) -> Models:
    role = config.actor_rollout_ref
    settings = role.model
    policy = policy_shape(config)
    # A run that only validates loads neither anchor nor critic.
    if config.trainer.val_only:
        return Models(policy)
    # Without a path of its own the anchor starts as the policy, but has no adapters to train.
    anchor = (
        replace(policy, num_adapted=0, num_frozen=0)
        if role.ref.path is None
        else model_shape(CausalLm.of(role.ref.path, settings, CPU))
    )
    critic = None
    if has_critic(config):
        import_modules(config.critic.model.external_lib)
        model = config.critic.model
        critic = trained_shape(TokenClassifier.of(model.path, model, CPU), model)
    # An anchor that is the policy without its adapters is not loaded a second time.
    own_anchor = has_anchor(config) and not anchor_is_base(config)
    return Models(policy, anchor if own_anchor else None, critic)


def require_embeddings(
    models: Models, tokenizer: PreTrainedTokenizerBase, environment: Environment, prompts: PromptSets
) -> None:
    """Raise ConfigError or DataError if a model has no embedding for a token that it will read.

    A tokenizer may have added tokens beyond the embedding that nothing uses (Gemma 3 has one).
    """
    # All models read the same ids, so the one with the fewest embeddings decides.
    role, shape = min(models.loaded().items(), key=lambda item: item[1].num_embeddings)
    # Added tokens count only where the run uses them: in what the environment writes, and at the end of a turn.
    added, tags = tokenizer.get_added_vocab().values(), (*environment.tags, environment.example_turn)
    ordinary = max(set(tokenizer.get_vocab().values()) - set(added), default=0)
    written = max((token for text in tags for token in encode_text(tokenizer, text)), default=0)
    needed = {"the tokenizer": ordinary, "the environment": written, "the end of a turn": tokenizer.eos_token_id or 0}
    for user, token in needed.items():
        if token >= shape.num_embeddings:
            raise ConfigError(
                f"{user} uses token {token} ({tokenizer.decode([token])!r}), but the {role} model has embeddings for 0 "
                f"to {shape.num_embeddings - 1}; use its own tokenizer, or enlarge the model's embedding "
                "(resize_token_embeddings) and save it"
            )
    prompts.check_ids(shape.num_embeddings)


def require_weights(config: Config) -> None:
    """Raise ConfigError if a model folder that the run loads has no weights, or files of them that are damaged.

    Only their headers are read.
    """
    role = config.actor_rollout_ref
    paths = {"actor_rollout_ref.model.path": role.model.path, "actor_rollout_ref.ref.path": role.ref.path}
    if has_critic(config):
        paths["critic.model.path"] = config.critic.model.path
    for setting, path in paths.items():
        folder = Path(path or "").expanduser()
        if not path or not folder.is_dir():  # the hub's are downloaded by who loads them
            continue
        try:
            files = weight_files(folder)
            # Many tensors share a file, whose header is read once.
            for file in dict.fromkeys(files.file_of.values() if files else ()):
                WeightFiles.of(file)
        except CheckpointError as error:
            raise ConfigError(f"{setting}={path}: {error}") from error
        # Weights in the older format of PyTorch have no header that could be read, so it is enough that they are there.
        if files is None and not any(folder.glob("pytorch_model*.bin")):
            raise ConfigError(f"{setting}={path} has no weights: neither model.safetensors nor an index")


def require_savable(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save all of each trained model but its weights, as a test. Raises ConfigError: a run would fail at its first
    checkpoint.
    """
    role = config.actor_rollout_ref.model
    _save_as_a_test(CausalLm.of(role.path, role, CPU), tokenizer)
    if has_critic(config):
        critic = config.critic.model
        _save_as_a_test(TokenClassifier.of(critic.path, critic, CPU), load_critic_tokenizer(config))


def _save_as_a_test(hf: HfModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model = hf.blank()
    if model.can_generate():
        _check_end_of_text(model.generation_config, hf)
    save_as_a_test(model, tokenizer, f"{hf.setting}={hf.path}")


def _check_end_of_text(generation_config: GenerationConfig | None, hf: HfModel) -> None:
    """Raise ConfigError unless the end of a text is given by ids: transformers takes anything, vLLM needs ids."""
    found = None if generation_config is None else generation_config.eos_token_id
    if not all(isinstance(token, int) for token in (found if isinstance(found, list) else [found or 0])):
        raise ConfigError(
            f"{hf.setting}={hf.path}: eos_token_id of its generation_config.json is {found!r}, not a token id "
            "or a list of them"
        )


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


def _in_words(number: int) -> str:
    """A number in billions, or in millions where that says more."""
    return f"{number / 1e9:.1f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
