"""Policy losses per token, found by name in `POLICY_LOSSES`: one file each, all registered by this import."""

from verl.algorithms.policy_loss.base import POLICY_LOSSES, Clip, PolicyLoss, PolicyLossFunction
from verl.algorithms.policy_loss.cispo import cispo_loss
from verl.algorithms.policy_loss.gspo import gspo_loss
from verl.algorithms.policy_loss.ppo import ppo_loss
from verl.algorithms.policy_loss.reinforce import reinforce_loss

__all__ = [
    "POLICY_LOSSES",
    "Clip",
    "PolicyLoss",
    "PolicyLossFunction",
    "cispo_loss",
    "gspo_loss",
    "ppo_loss",
    "reinforce_loss",
]
