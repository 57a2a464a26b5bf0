"""What follows from the settings of the reward: the server that a run starts for it (`reward.launch`), and the format
reward of `verl.trainer.main_ppo_format`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verl.config.sections.agent import RewardConfig
from verl.config.sections.schema import Config
from verl.errors import ConfigError

SERVER = "{server}"


def with_server(value: Any, address: str) -> Any:
    """The reward's arguments `value` with `address` (host:port) in place of `{server}` in every text, however deep."""
    if isinstance(value, str):
        return value.replace(SERVER, address)
    if isinstance(value, dict):
        return {key: with_server(item, address) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_server(item, address) for item in value]
    return value


def names_server(value: Any) -> bool:
    """Whether any text of the arguments has `{server}` in it."""
    return with_server(value, "") != value


def reward_server_problems(config: Config) -> Iterator[str]:
    """A server that cannot be started, or would not be asked: one message each."""
    reward = config.reward
    named = names_server(reward.kwargs) or names_server(reward.val_kwargs)
    if reward.launch is None and named:
        yield (
            f"reward.kwargs have {SERVER}, which stands for the server of reward.launch: set reward.launch, or "
            "write the host and port"
        )
    if reward.launch is not None and not named:
        yield (
            f"reward.launch starts a server, but no argument of the reward refers to it: write {SERVER} where "
            f"reward.kwargs has its host and port (url=http://{SERVER}/v1), or leave reward.launch out"
        )
    if reward.launch is None and reward.n_gpus:
        yield f"reward.n_gpus={reward.n_gpus} has no effect without reward.launch: set that, or leave n_gpus at 0"


def expected_address(reward: RewardConfig) -> str:
    """The address that checks use for the server before it is known where it runs."""
    return f"127.0.0.1:{reward.port}"


FORMAT_REWARD = "search_r1.rewards.format_reward.FormatReward"
COEFFICIENTS = ("structure_format_score", "final_format_score", "retrieval_score")


def asks_for_format_reward(config: Config) -> bool:
    """Whether the config has coefficients of the format reward, which main_ppo refuses."""
    return any(getattr(config.reward_model, name) for name in COEFFICIENTS)


def with_format_reward(config: Config) -> Config:
    """A copy of `config` that the format reward scores. Raises ConfigError when `config` names another reward."""
    if config.reward != RewardConfig():
        raise ConfigError("main_ppo_format brings its own reward: leave out reward.*, or use verl.trainer.main_ppo")
    coefficients = {name: getattr(config.reward_model, name) for name in COEFFICIENTS}
    reward = RewardConfig(FORMAT_REWARD, kwargs=coefficients, val_kwargs={})
    taken = replace(config.reward_model, structure_format_score=0.0, final_format_score=0.0, retrieval_score=0.0)
    return replace(config, reward=reward, reward_model=taken)
