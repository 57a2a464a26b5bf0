"""`.venv/bin/python -m verl.trainer.main_ppo_format key=value ...`: main_ppo with the format reward.

Training rewards also the form of a trajectory, by `reward_model.structure_format_score`, `final_format_score` and
`retrieval_score`; validation counts exact matches alone.
"""

from __future__ import annotations

from verl.config.rules.rewards import with_format_reward
from verl.process.startup import leave
from verl.trainer.main_ppo import main

if __name__ == "__main__":
    leave(main(adapt=with_format_reward, program="verl.trainer.main_ppo_format"))
