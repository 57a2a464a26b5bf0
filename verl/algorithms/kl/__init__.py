"""KL between policy p and reference q, per token: sampled, exact, over the top k, and where it enters the objective."""

from verl.algorithms.kl.controller import AdaptiveKL, FixedKL, KLController
from verl.algorithms.kl.exact import EXACT_KL, ExactKL
from verl.algorithms.kl.importance import importance_weight
from verl.algorithms.kl.placement import kl_to_go, penalised_rewards
from verl.algorithms.kl.sampled import SAMPLED_KL, SAMPLED_KL_NAMES, sampled_kl
from verl.algorithms.kl.topk import TOPK_KL, TopkGradient, topk_forward, topk_reverse

__all__ = [
    "EXACT_KL",
    "SAMPLED_KL",
    "SAMPLED_KL_NAMES",
    "TOPK_KL",
    "AdaptiveKL",
    "ExactKL",
    "FixedKL",
    "KLController",
    "TopkGradient",
    "importance_weight",
    "kl_to_go",
    "penalised_rewards",
    "sampled_kl",
    "topk_forward",
    "topk_reverse",
]
