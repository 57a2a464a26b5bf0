"""KL between policy p and reference q, per token: sampled, exact, over the top k, and where it enters the objective."""

from verl.algorithms.kl.controller import AdaptiveKL as AdaptiveKL
from verl.algorithms.kl.controller import FixedKL as FixedKL
from verl.algorithms.kl.controller import KLController as KLController
from verl.algorithms.kl.exact import EXACT_KL as EXACT_KL
from verl.algorithms.kl.exact import ExactKL as ExactKL
from verl.algorithms.kl.importance import importance_weight as importance_weight
from verl.algorithms.kl.placement import kl_to_go as kl_to_go
from verl.algorithms.kl.placement import penalised_rewards as penalised_rewards
from verl.algorithms.kl.sampled import SAMPLED_KL as SAMPLED_KL
from verl.algorithms.kl.sampled import SAMPLED_KL_NAMES as SAMPLED_KL_NAMES
from verl.algorithms.kl.sampled import sampled_kl as sampled_kl
from verl.algorithms.kl.topk import TOPK_KL as TOPK_KL
from verl.algorithms.kl.topk import TopkGradient as TopkGradient
from verl.algorithms.kl.topk import topk_forward as topk_forward
from verl.algorithms.kl.topk import topk_reverse as topk_reverse
