"""A small decision process in which the policy chooses when to stop, and all its trajectories.

It has up to three turns. In a turn the policy takes one of three actions, the last of which ends the episode, and gets
one of two rewards; it sees both. The policy is a table: logits of its own for each history.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInput

NUM_TURNS, NUM_ACTIONS, STOP = 3, 3, 2
History = tuple[tuple[int, int], ...]
"""(action, number of the reward) of each turn so far."""
Estimator = Callable[[AdvantageInput], Tensor]
"""Gives the advantage of each token, [T]."""


@dataclass(frozen=True)
class Episode:
    """A trajectory: the histories before its turns, its actions, its rewards, and the probability of the latter."""

    states: tuple[int, ...]
    actions: tuple[int, ...]
    rewards: tuple[float, ...]
    reward_probability: float


class StoppingProcess:
    """The process with drawn rewards and a drawn policy, `logits_SA` (float64, states and actions)."""

    def __init__(self, seed: int) -> None:
        draws = random.Random(seed)
        pairs = list(itertools.product(range(STOP), range(2)))
        states = [history for n in range(NUM_TURNS) for history in itertools.product(pairs, repeat=n)]
        self._number: dict[History, int] = {history: number for number, history in enumerate(states)}
        self._outcomes = {
            (state, action): [(draws.uniform(-1, 2), share), (draws.uniform(-1, 2), 1 - share)]
            for state in range(len(states))
            for action in range(NUM_ACTIONS)
            for share in [draws.uniform(0.2, 0.8)]
        }
        logits = [[draws.gauss(0, 1) for _ in range(NUM_ACTIONS)] for _ in states]
        self.logits_SA = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        self.episodes = list(self._after((), Episode((), (), (), 1.0)))

    def _after(self, history: History, so_far: Episode) -> list[Episode]:
        if len(history) == NUM_TURNS or (history and history[-1][0] == STOP):
            return [so_far]
        found, state = [], self._number[history]
        for action in range(NUM_ACTIONS):
            for number, (reward, share) in enumerate(self._outcomes[state, action]):
                longer = Episode(
                    (*so_far.states, state),
                    (*so_far.actions, action),
                    (*so_far.rewards, reward),
                    so_far.reward_probability * share,
                )
                found += self._after((*history, (action, number)), longer)
        return found

    def log_probs(self) -> list[Tensor]:
        """For each episode, the log-prob of each of its actions, [K]."""
        log_probs_SA = self.logits_SA.log_softmax(1)
        return [log_probs_SA[list(one.states), list(one.actions)] for one in self.episodes]

    def probabilities(self) -> Tensor:
        """[E]: how often each episode happens."""
        chance_E = torch.tensor([one.reward_probability for one in self.episodes], dtype=torch.float64)
        return chance_E * torch.stack([log_probs_K.sum() for log_probs_K in self.log_probs()]).exp()

    def true_gradient(self) -> Tensor:
        """[S, A]: of the expected sum of rewards, by autograd on its definition."""
        return_E = torch.tensor([sum(one.rewards) for one in self.episodes], dtype=torch.float64)
        return torch.autograd.grad((self.probabilities() * return_E).sum(), self.logits_SA)[0]

    def estimated_gradient(self, size: int, estimator: Estimator, at_end: bool = False) -> tuple[Tensor, float]:
        """The mean [S, A] and the variance (summed over S, A) of what an estimator makes of a group of `size` episodes,
        (1 / size) sum_i sum_k A_ik grad log pi(a_ik), over all groups. `at_end`: rewards are given at the end only.
        """
        groups = torch.cartesian_prod(*[torch.arange(len(self.episodes))] * size)
        chosen = [self.episodes[number] for number in groups.flatten().tolist()]
        rewards = [(0.0,) * (len(one.actions) - 1) + (sum(one.rewards),) if at_end else one.rewards for one in chosen]
        length_B = torch.tensor([len(one.actions) for one in chosen])
        row_T = torch.arange(len(chosen)).repeat_interleave(length_B)
        given = AdvantageInput(
            torch.tensor(list(itertools.chain.from_iterable(rewards)), dtype=torch.float64),
            torch.ones_like(row_T, dtype=torch.bool),
            row_T,
            torch.arange(len(groups)).repeat_interleave(size),
            turn_T=torch.arange(len(row_T)) - (length_B.cumsum(0) - length_B)[row_T],
        )
        advantage_T = estimator(given)
        # grad log pi(a) is (1 at a, 0 elsewhere) - pi, in the row of the state
        state_T = torch.tensor(list(itertools.chain.from_iterable(one.states for one in chosen)))
        action_T = torch.tensor(list(itertools.chain.from_iterable(one.actions for one in chosen)))
        score_TA = torch.nn.functional.one_hot(action_T, NUM_ACTIONS) - self.logits_SA.detach().softmax(1)[state_T]
        estimate_XA = score_TA.new_zeros(len(groups) * len(self.logits_SA), NUM_ACTIONS)
        place_T = given.group_B[row_T] * len(self.logits_SA) + state_T
        estimate_XA.index_add_(0, place_T, advantage_T[:, None] * score_TA / size)
        estimate_GSA = estimate_XA.view(len(groups), *self.logits_SA.shape)
        probability_G = self.probabilities().detach()[groups].prod(1)
        mean_SA = torch.einsum("g,gsa->sa", probability_G, estimate_GSA)
        square = torch.einsum("g,gsa,gsa->", probability_G, estimate_GSA, estimate_GSA)
        return mean_SA, float(square - mean_SA.square().sum())
