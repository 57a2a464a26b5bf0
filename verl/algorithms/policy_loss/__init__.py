"""Policy losses per token, found by name in `POLICY_LOSSES`: one file each, all registered by this import."""

from verl.algorithms.policy_loss.base import POLICY_LOSSES as POLICY_LOSSES
from verl.algorithms.policy_loss.base import Clip as Clip
from verl.algorithms.policy_loss.base import PolicyLoss as PolicyLoss
from verl.algorithms.policy_loss.base import PolicyLossFunction as PolicyLossFunction
from verl.algorithms.policy_loss.cispo import cispo_loss as cispo_loss
from verl.algorithms.policy_loss.gspo import gspo_loss as gspo_loss
from verl.algorithms.policy_loss.ppo import ppo_loss as ppo_loss
from verl.algorithms.policy_loss.reinforce import reinforce_loss as reinforce_loss
