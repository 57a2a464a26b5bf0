"""The typed tree of an RL run. Its defaults are those of configs/ppo_trainer.yaml (a test compares them)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.sections.actor import ActorRolloutRefConfig
from verl.config.sections.agent import AgentConfig, RetrieverConfig, RewardConfig
from verl.config.sections.algorithm import AlgorithmConfig
from verl.config.sections.critic import CriticConfig, RewardModelConfig
from verl.config.sections.data import DataConfig
from verl.config.sections.fields import section, setting
from verl.config.sections.trainer import TrainerConfig


@dataclass
class Config:
    """Everything that defines an RL run."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    agent: AgentConfig = section(AgentConfig)
    reward: RewardConfig = section(RewardConfig)
    retriever: RetrieverConfig = section(RetrieverConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    max_turns: int = setting(
        10, "Maximum number of searches in a trajectory; one more turn without search follows.", ge=0
    )
    do_search: bool = setting(True, "Multi-turn rollouts with the environment; false: a single turn per prompt.")
