"""The typed configuration of a run: composed from configs/*.yaml by Hydra, then checked. Imports no torch."""

from verl.config.actor import ActorConfig, ActorRolloutRefConfig, RefConfig
from verl.config.agent import AgentConfig, RetrieverConfig, RewardConfig
from verl.config.algorithm import AlgorithmConfig, KlCtrlConfig
from verl.config.command_line import load_config_from_argv, load_from_argv
from verl.config.compose import CONFIG_DIR, load, to_yaml
from verl.config.critic import CriticConfig, RewardModelConfig
from verl.config.data import DataConfig
from verl.config.model import FsdpConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from verl.config.rollout import RolloutConfig, ValKwargs
from verl.config.run import load_config
from verl.config.schema import Config
from verl.config.stored import load_stored_config
from verl.config.supported import check_supported
from verl.config.trainer import TrainerConfig
from verl.config.validate import validate

__all__ = [
    "CONFIG_DIR",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "FsdpConfig",
    "KlCtrlConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimConfig",
    "RefConfig",
    "RetrieverConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValKwargs",
    "check_supported",
    "load",
    "load_config",
    "load_config_from_argv",
    "load_from_argv",
    "load_stored_config",
    "to_yaml",
    "validate",
]
