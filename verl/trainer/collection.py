"""What a step trains on: prompts drawn, trajectories sampled and scored, useless groups replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verl.algorithms.selection import informative_rows
from verl.config import Config
from verl.config.counts import trajectories_per_step
from verl.data.prompts import PromptSource
from verl.protocol import Prompt, TrainBatch, Trajectory, reward_rows
from verl.rollout.manager import RolloutManager
from verl.trainer.scoring import Scorer


@dataclass
class Collected:
    """`sampled` is everything, failed trajectories too; `trained` are the rows of `batch`, in order."""

    sampled: list[Trajectory]
    trained: list[Trajectory]
    batch: TrainBatch
    metrics: dict[str, float] = field(default_factory=dict)


class Collector:
    """Draws from `prompts` until a step has `data.train_batch_size` groups that it can learn from.

    Without `algorithm.filter_groups` that is one round. With it, groups whose rewards are all equal are left out and
    new prompts are drawn, for at most `max_num_gen_batches` rounds.
    """

    def __init__(self, config: Config, prompts: PromptSource, rollouts: RolloutManager, scorer: Scorer) -> None:
        self.config = config
        self.prompts = prompts
        self.rollouts = rollouts
        self.scorer = scorer
        self.per_prompt = trajectories_per_step(config) // config.data.train_batch_size

    def collect(self, step: int) -> Collected:
        """Raises RolloutError when too much has failed (see `RolloutManager.collect`)."""
        wanted = self.config.data.train_batch_size
        filtering = self.config.algorithm.filter_groups
        prompts: list[Prompt] = []
        sampled: list[Trajectory] = []
        trained: list[Trajectory] = []
        attempts = failures = unavailable = 0.0
        for _ in range(filtering.max_num_gen_batches if filtering.enable else 1):
            drawn = self.prompts.next(wanted)
            new = self.rollouts.collect(drawn, self.per_prompt, step, first_group=len(prompts))
            drawn_again = self.rollouts.stats["env/redraws"]
            attempts += len(new) + drawn_again
            failures += self.rollouts.stats["env/failed_ratio"] * (len(new) + drawn_again)
            prompts += drawn
            sampled += new
            usable = self.scorer.score(new)
            unavailable += self.scorer.stats["reward/unavailable_ratio"]
            trained += _informative(usable) if filtering.enable else usable
            if num_groups(trained) >= wanted:
                break
        rounds = len(prompts) // wanted
        metrics = {
            "env/failed_ratio": failures / attempts,
            "env/redraws": attempts - len(sampled),
            "reward/unavailable_ratio": unavailable / rounds,
        }
        if filtering.enable:
            metrics |= {"filter_groups/rounds": float(rounds), "filter_groups/kept": num_groups(trained) / len(prompts)}
            trained = _first_groups(trained or usable, wanted)
        if self.config.algorithm.adv_estimator != "remax":
            return Collected(sampled, trained, TrainBatch.from_trajectories(trained), metrics)
        baselines = self._greedy_rewards(prompts, sampled, step)
        trained = [trajectory for trajectory in trained if trajectory.group_id in baselines]
        batch = TrainBatch.from_trajectories(trained)
        batch.rows["baseline"] = torch.tensor([baselines[trajectory.group_id] for trajectory in trained])
        return Collected(sampled, trained, batch, metrics)

    def _greedy_rewards(self, prompts: list[Prompt], sampled: list[Trajectory], step: int) -> dict[str, float]:
        """By group: the reward of the greedy answer to its prompt. Groups whose greedy answer failed are not there."""
        answers = self.rollouts.collect(prompts, 1, step, how="greedy")
        scored = {id(answer) for answer in self.scorer.score(answers)}
        groups = [trajectory.group_id for trajectory in sampled[:: self.per_prompt]]  # one a prompt, in prompt order
        return {
            group: answer.reward
            for group, answer in zip(groups, answers, strict=True)
            if id(answer) in scored and answer.reward is not None
        }


def num_groups(trajectories: list[Trajectory]) -> int:
    return len({trajectory.group_id for trajectory in trajectories})


def _informative(trajectories: list[Trajectory]) -> list[Trajectory]:
    rows = reward_rows(trajectories)
    keep_B = informative_rows(rows["reward"], rows["group"])
    return [trajectory for trajectory, keep in zip(trajectories, keep_B.tolist(), strict=True) if keep]


def _first_groups(trajectories: list[Trajectory], number: int) -> list[Trajectory]:
    groups = list(dict.fromkeys(trajectory.group_id for trajectory in trajectories))[:number]
    return [trajectory for trajectory in trajectories if trajectory.group_id in set(groups)]
