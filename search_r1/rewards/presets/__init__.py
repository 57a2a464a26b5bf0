"""Published rewards, each as a class for `reward.function=search_r1.rewards.presets.NAME`.

All of them read only the policy's own text, never the prompt or search results. If a published reward does otherwise,
or has another fault, the docstring of its class says so, and what is done here instead.
"""

from search_r1.rewards.presets.autorefine import AutoRefineReward
from search_r1.rewards.presets.r1_searcher import R1SearcherReward, R1SearcherStage1Reward
from search_r1.rewards.presets.research import ResearchReward
from search_r1.rewards.presets.search_r1 import SearchR1V02Reward, SearchR1V03Reward

__all__ = [
    "AutoRefineReward",
    "R1SearcherReward",
    "R1SearcherStage1Reward",
    "ResearchReward",
    "SearchR1V02Reward",
    "SearchR1V03Reward",
]
