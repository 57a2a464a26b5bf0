"""Collects what a step trains on: draws prompts, samples and scores trajectories, replaces groups that teach nothing,
and decides which groups the step trains on while they are being completed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from verl.agent.environment import SamplingMode
from verl.algorithms.selection import informative_rows
from verl.config import Config
from verl.config.rules.predicates import estimator_traits, max_staleness, trajectories_per_step
from verl.data.prompts import PromptSource
from verl.errors import WeightSyncError
from verl.protocol import TrainBatch, Trajectory, reward_rows
from verl.rollout.episode_queue import Group, groups_of
from verl.rollout.manager import RolloutManager
from verl.trainer.metrics.performance import SampledWork, WorkOfStep
from verl.trainer.sampling.scoring import Scorer


@dataclass
class Selection:
    """Collects `wanted` useful groups from at most `most`; each useless group is replaced at once by a new one.

    `due` are groups that cannot wait for another step: they are taken, however long they take. If there are more groups
    than wanted, the first to complete are taken. `in_order` decides about a group only when all groups before it are
    complete, so that the decision does not depend on timing.

    new_groups: makes so many groups of the next prompts.
    are_useful: for each group, whether it is; None if that is not known yet. It is called again with those groups, and
    with true as its second argument when it has to wait until it knows.
    """

    wanted: int
    most: int
    new_groups: Callable[[int], list[Group]]
    are_useful: Callable[[Sequence[Group], bool], Sequence[bool | None]]
    groups: list[Group]
    due: list[Group] = field(default_factory=list)
    in_order: bool = False
    useful: list[Group] = field(default_factory=list)  # in the order in which they were completed
    useless: list[Group] = field(default_factory=list)
    _undecided: list[Group] = field(default_factory=list)

    def next_groups(self, complete: Sequence[Group], wait: bool) -> list[Group] | None:
        """The groups to begin now; see `verl.rollout.episode_queue.NextGroups`."""
        self._undecided += complete
        # Groups whose answer is None stay undecided, and are asked about again.
        asked = self._leading() if self.in_order else list(self._undecided)
        answers = dict(zip(asked, self.are_useful(asked, wait) if asked else [], strict=True))
        self._undecided = [group for group in self._undecided if answers.get(group) is None]
        self.useful += [group for group, is_useful in answers.items() if is_useful]
        new_useless = [group for group, is_useful in answers.items() if is_useful is False]
        self.useless += new_useless
        # It is over when there are enough, and none is missing of those that cannot wait for another step.
        if len(self.useful) >= self.wanted and all(group in self.useful + self.useless for group in self.due):
            return None
        # A new group for each one that turned out useless, as long as the step may sample more.
        new = self.new_groups(max(0, min(len(new_useless), self.most - len(self.groups))))
        self.groups += new
        return new

    @property
    def taken(self) -> list[Group]:
        """The groups that the step trains on, at most `wanted`, in the order in which they were begun."""
        first = sorted(self.useful, key=lambda group: group not in self.due)[: self.wanted]
        return in_order_of_beginning(first)

    @property
    def left(self) -> list[Group]:
        """Groups that continue in the next step: first the complete ones, then the others."""
        gone = [*self.taken, *self.useless]
        left = in_order_of_beginning([group for group in self.groups if group not in gone])
        return sorted(left, key=lambda group: not group.is_complete)

    def _leading(self) -> list[Group]:
        decided = [*self.useful, *self.useless]
        leading: list[Group] = []
        for group in self.groups:
            if group in self._undecided:
                leading.append(group)
            elif group not in decided:
                break
        return leading


def in_order_of_beginning(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (group.step, group.number))


@dataclass
class Collected:
    """A step's trajectories. `sampled` is everything, failed ones too; `trained` are the rows of `batch`, in order.

    `work` is what was sampled meanwhile, also of groups that continue in the next step, and nothing of earlier steps.
    """

    sampled: list[Trajectory]
    trained: list[Trajectory]
    batch: TrainBatch
    metrics: dict[str, float] = field(default_factory=dict)
    work: SampledWork = SampledWork(0, 0, ())


class Collector:
    """Draws from `prompts` until a step has `data.train_batch_size` groups that it can learn from.

    With `algorithm.filter_groups` a group whose rewards are all equal is left out, and a new prompt takes its place at
    once, up to `max_num_gen_batches` times the batch. With `rollout.over_sample` more groups are in progress than the
    batch needs; `carried` are those that continue in the next step.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSource,
        rollouts: RolloutManager,
        scorer: Scorer,
        last_step: int | None = None,
    ) -> None:
        """`last_step`: no groups are carried over after it."""
        self.config = config
        self.prompts = prompts
        self.rollouts = rollouts
        self.scorer = scorer
        self.last_step = last_step
        self.carried: list[Group] = []
        self._wanted = config.data.train_batch_size
        self._filtering = config.algorithm.filter_groups.enable
        self._needs_greedy = estimator_traits(config).needs_greedy
        train: list[SamplingMode] = ["train"] * (trajectories_per_step(config) // self._wanted)
        self._modes: list[SamplingMode] = [*train, "greedy"] if self._needs_greedy else train

    def collect(self, step: int) -> Collected:
        """Collect a step. Raises RolloutError when too many trajectories failed (see `RolloutManager.collect`)."""
        # Sample: groups that were carried over, and new ones up to what is to be in progress.
        self.scorer.begin([one for mode in set(self._modes) for one in _trajectories(self.carried, mode)])
        work = WorkOfStep(self.carried)
        selection = self._selection(step)
        num_carried = len(selection.groups)
        selection.groups += selection.new_groups(self._wanted + self._num_extra(step) - num_carried)
        self.rollouts.collect_groups(list(selection.groups), step, selection.next_groups)
        self.carried = selection.left
        done = work.on([*selection.taken, *selection.useless, *selection.left])

        # Score what the step uses; dynamic sampling has done so to select. Without a useful group it trains on others.
        taken = selection.taken or in_order_of_beginning(selection.useless)[-self._wanted :]
        sampled = _trajectories(in_order_of_beginning([*selection.taken, *selection.useless]))
        if not self._filtering:
            self.scorer.score_some(sampled)
        self.scorer.require_enough(sampled)

        # Report, and tell the curriculum: at the end of a step, so that timing within it does not change what is drawn.
        metrics = dict(self.rollouts.stats) | self.scorer.stats
        if self.config.data.curriculum.enable:
            self._observe(in_order_of_beginning([*selection.taken, *selection.useless]))
            metrics |= self.prompts.curriculum_metrics()
        if self._filtering:
            judged = len(selection.useful) + len(selection.useless)
            metrics |= {
                "filter_groups/rounds": judged / self._wanted,
                "filter_groups/kept": len(selection.useful) / judged,
            }
        if self._num_extra(step) or num_carried:
            metrics |= self._carrying(taken, step)

        # Train on what has a reward, and, where an estimator needs it, the reward of a greedy answer.
        trained = [trajectory for trajectory in _trajectories(taken) if trajectory.reward is not None]
        if not self._needs_greedy:
            return Collected(sampled, trained, TrainBatch.from_trajectories(trained), metrics, done)
        baselines = self._greedy_rewards(taken)
        trained = [trajectory for trajectory in trained if trajectory.group_id in baselines]
        batch = TrainBatch.from_trajectories(trained)
        baseline_R = torch.tensor([baselines[trajectory.group_id] for trajectory in trained])
        batch.rows["baseline"] = baseline_R[batch.rollout_B]
        return Collected(sampled, trained, batch, metrics, done)

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts; prompts of carried-over groups come first, and are sampled again."""
        return self.prompts.state_dict(again=[group.prompt for group in self.carried])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.carried = []
        self.prompts.load_state_dict(state)

    def forget(self) -> None:
        """Discard what was sampled of groups that were carried over; their prompts are sampled again."""
        self.load_state_dict(self.state_dict())

    def _selection(self, step: int) -> Selection:
        """A selection that begins with the groups that were carried over. They are due when their oldest ids may not be
        a version older.
        """
        # Dynamic sampling may need several rounds of groups until enough are useful; without it one round is enough.
        groups, self.carried = self.carried, []
        rounds = self.config.algorithm.filter_groups.max_num_gen_batches if self._filtering else 1
        numbers = count()

        # Prompts are taken from the dataset only when their groups begin: its position is saved with the run.
        def new_groups(number: int) -> list[Group]:
            return [
                group
                for prompt in self.prompts.next(max(0, number))
                for group in groups_of([prompt], self._modes, step, next(numbers))
            ]

        bound = max_staleness(self.config)
        versions = {group: group.oldest_version() for group in groups}
        return Selection(
            self._wanted,
            rounds * self._wanted + self._num_extra(step),
            new_groups,
            self._are_useful,
            groups,
            due=[group for group, version in versions.items() if version is not None and step - version > bound],
            in_order=self.config.trainer.deterministic,
        )

    def _num_extra(self, step: int) -> int:
        if step == self.last_step:
            return 0
        return math.ceil(self.config.actor_rollout_ref.rollout.over_sample * self._wanted)

    def _are_useful(self, groups: Sequence[Group], wait: bool) -> list[bool | None]:
        """Whether each group is useful; see `Selection`. Without dynamic sampling all are, and their rewards are needed
        only when the step trains.
        """
        if not self._filtering:
            for mode in sorted(set(self._modes)):
                self.scorer.score_ahead(_trajectories(groups, mode))
            return [True] * len(groups)
        self.scorer.score_ahead(_trajectories(groups))
        known = [group for group in groups if wait or self.scorer.can_score_now(group.trajectories("train"))]
        self.scorer.score_some(_trajectories(known))
        self.scorer.require_enough_so_far(self._wanted * self._modes.count("train"))
        return [_is_informative(group.trajectories("train")) if group in known else None for group in groups]

    def _observe(self, groups: Sequence[Group]) -> None:
        """Tell the curriculum which groups had equal rewards. If the infrastructure has failed a trajectory, the group
        counts only if the others differ: that one might have had another reward.
        """
        for group in groups:
            trajectories = group.trajectories("train")
            is_informative = _is_informative(trajectories)
            if is_informative or all(trajectory.reward is not None for trajectory in trajectories):
                self.prompts.observe(group.prompt, not is_informative)

    def _carrying(self, taken: Sequence[Group], step: int) -> dict[str, float]:
        return {
            "rollout/over_sample/carried": float(len(self.carried)),
            "rollout/over_sample/complete": float(sum(group.is_complete for group in self.carried)),
            "rollout/over_sample/resumed": float(sum(group.step < step for group in taken)),
        }

    def _greedy_rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        """The reward of the greedy answer to each group's prompt, by group; without those whose answer failed."""
        answers = {group.id: answer for group in groups for answer in group.trajectories("greedy")}
        self.scorer.score(list(answers.values()))
        return {group: answer.reward for group, answer in answers.items() if answer.reward is not None}


def _trajectories(groups: Sequence[Group], mode: SamplingMode = "train") -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories(mode)]


def _is_informative(trajectories: Sequence[Trajectory]) -> bool:
    usable = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    rows = reward_rows(usable)
    return bool(usable) and bool(informative_rows(rows["reward"], rows["group"]).any())


# Staleness: by how many versions the weights that sampled a step are older than those that are trained on it.


def staleness_metrics(trajectories: Sequence[Trajectory], step: int, most: int) -> dict[str, float]:
    """The metrics `rollout/staleness/{mean,max}` in versions, over tokens. Step n trains version n - 1, so a token that
    version n - 2 sampled has a staleness of 1.

    Where a trajectory was sampled by several versions, the mean is over its tokens, and the bound holds for each.
    Raises WeightSyncError where a staleness is below 0 or above `most`.
    """
    found = Counter[int]()  # tokens by staleness
    wrong = []
    for trajectory in trajectories:
        own = Counter[int]()
        for version, number in trajectory.weight_versions:
            own[step - 1 - version] += number
        # One value for each trajectory, since the message counts trajectories.
        wrong += [staleness for staleness in own if not 0 <= staleness <= most][:1]
        found += own
    if wrong:
        raise WeightSyncError(
            f"step {step}: {len(wrong)} of {len(trajectories)} trajectories were sampled by version "
            f"{step - 1 - wrong[0]} of the weights, but only versions {step - 1 - most} to {step - 1} may be "
            "trained on (trainer.max_staleness)"
        )
    mean = sum(staleness * number for staleness, number in found.items()) / max(1, found.total())
    return {"rollout/staleness/mean": mean, "rollout/staleness/max": float(max(found, default=0))}
