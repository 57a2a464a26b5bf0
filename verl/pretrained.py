"""Tokenizers and model configs from a Hugging Face folder or hub name: the one place that loads them.

Code that comes with the files runs only where `trust_remote_code` says so; else it is an error, never a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from verl.config import Config


def load_tokenizer(path: str, trust_remote_code: bool, setting: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`. Raises `ConfigError`, naming the `setting` that `path` is from."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers, or of code that came with the files
        raise ConfigError(f"{setting}={path}: no tokenizer could be loaded: {error}") from error
    # Where the files are missing, transformers may make one by the model's type that knows no word, and say nothing.
    if len(tokenizer) <= len(getattr(tokenizer, "added_tokens_decoder", ())):
        raise ConfigError(
            f"{setting}={path}: no tokenizer could be loaded: it has no vocabulary; add its files (tokenizer.json, "
            "tokenizer_config.json)"
        )
    return tokenizer


def load_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of prompts, rollouts and rewards. Raises `ConfigError`."""
    model = config.actor_rollout_ref.model
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer, model.trust_remote_code, "data.tokenizer")
    return load_tokenizer(model.path, model.trust_remote_code, "actor_rollout_ref.model.path")


def load_critic_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer that is saved with a critic. Raises `ConfigError`."""
    model = config.critic.model
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer, model.trust_remote_code, "data.tokenizer")
    return load_tokenizer(model.tokenizer_path, model.trust_remote_code, "critic.model.tokenizer_path")


def load_model_config(
    path: str, trust_remote_code: bool, override_config: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The config.json at `path`, with some values replaced. Raises what Hugging Face raises: OSError or ValueError."""
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code, **dict(override_config or {})
    )
    return config
