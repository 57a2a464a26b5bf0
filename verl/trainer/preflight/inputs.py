"""What is checked before any model is loaded: prompt files, the reward, and that the environment answers."""

from __future__ import annotations

from transformers import AutoConfig, AutoTokenizer

from verl.agent.environment import Environment
from verl.by_name import load_by_name
from verl.config import Config
from verl.data.prompts import check_files
from verl.errors import ConfigError
from verl.event_loop import run_to_end
from verl.trainer.scoring import Scorer


def check_inputs(config: Config) -> None:
    """Raises `DataError`, `ConfigError`, `RewardUnavailable` or `EnvironmentUnavailable`, each saying what to do."""
    data = config.data
    for files in (data.train_files, data.val_files, data.test_files):
        if files:
            check_files(files, data.prompt_key)
    Scorer(config, None).check()  # here, so that a wrong name or argument is known before a model is loaded
    if config.algorithm.adv_estimator == "gae" and not config.trainer.val_only:
        _check_critic(config.critic.model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer or config.actor_rollout_ref.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: no tokenizer could be loaded: {error}"
        ) from error
    _check_window(config)
    environment = load_by_name(config.agent.environment, "agent.environment").from_config(config, tokenizer)
    run_to_end(_check(environment))


def _check_window(config: Config) -> None:
    """The longest sequence of a run must fit into what the model was made for."""
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    longest = rollout.prompt_length + rollout.response_length
    window = getattr(AutoConfig.from_pretrained(path), "max_position_embeddings", None)
    if window is not None and longest > window:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest} tokens, but {path} was made for {window} "
            "(max_position_embeddings): lower the two"
        )


def _check_critic(path: str) -> None:
    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"algorithm.adv_estimator=gae needs a critic, and critic.model.path={path} is no model: {error}\n"
            "Set critic.model.path (the policy's own path, say), or use algorithm.adv_estimator=grpo with "
            "actor_rollout_ref.rollout.n_agent=5"
        ) from error


async def _check(environment: Environment) -> None:
    try:
        await environment.check()
    finally:
        await environment.close()
