"""What is checked before any model is loaded: prompt files, the reward, and that the environment answers."""

from __future__ import annotations

import asyncio

from transformers import AutoTokenizer

from verl.agent.environment import Environment
from verl.by_name import load_by_name
from verl.config import Config
from verl.data.prompts import check_files
from verl.errors import ConfigError


def check_inputs(config: Config) -> None:
    """Raises `DataError`, `ConfigError` or `EnvironmentUnavailable`, each saying what to do."""
    data = config.data
    for files in (data.train_files, data.val_files, data.test_files):
        if files:
            check_files(files, data.prompt_key)
    load_by_name(config.reward.function, "reward.function")
    try:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer or config.actor_rollout_ref.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: no tokenizer could be loaded: {error}"
        ) from error
    environment = load_by_name(config.agent.environment, "agent.environment").from_config(config, tokenizer)
    asyncio.run(_check(environment))


async def _check(environment: Environment) -> None:
    try:
        await environment.check()
    finally:
        await environment.close()
