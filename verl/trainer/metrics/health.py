"""Signs that a policy degrades, before its score shows it: plain floats named `health/...`.

What the policy did is read from the trajectories, what the models computed from the train batch. Failed trajectories
count nowhere. A name whose mean would be over nothing is left out.
Letters: `B` trajectories, `T` tokens of all rows, `N` policy tokens or n-grams, `G` ids of an n-gram, `K` turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from verl.algorithms.log_probs import mismatch
from verl.algorithms.selection import zero_variance_groups
from verl.protocol import Source, TrainBatch, Trajectory, reward_rows
from verl.trainer.metrics.batch import finished_ones, rewards_of

NGRAM = 4
MAX_TURNS = 8
"""Turns with a mismatch figure of their own; later ones count in the overall figures only."""


def health_metrics(
    trajectories: Sequence[Trajectory],
    batch: TrainBatch | None,
    scores: PolicyScores | None = None,
    truncated: bool = False,
) -> dict[str, float]:
    """The health metrics of one step; docs/health.md says what each one means.

    `trajectories`: everything sampled in the step. `batch`: its tokens; `advantages` [T] are read where present.
    `scores`: by default the batch's own `old_log_probs` and `entropy`. `truncated`: sampling left out unlikely tokens
    (top_p, top_k). The sampler's log-probs then differ from the trainer's by the log of the rest's mass, where nothing
    is wrong, so there is no `health/mismatch`.

    Raises ValueError for a finished trajectory without a reward.
    """
    finished = finished_ones(trajectories)
    metrics = turn_metrics(finished) | repetition(finished) | equal_rewards(finished)
    if batch is not None:
        scores = PolicyScores.of(batch) if scores is None else scores
        metrics |= zero_advantages(batch) | entropy(scores)
        metrics |= {} if truncated else sampler_mismatch(batch, scores)
    return metrics


def turn_metrics(finished: Sequence[Trajectory]) -> dict[str, float]:
    """`health/invalid_action_ratio` over all turns; `health/empty_think_ratio` over those whose event says."""
    metrics = {}
    num_turns = sum(trajectory.num_turns for trajectory in finished)
    if num_turns:
        num_valid = sum(trajectory.num_valid_actions for trajectory in finished)
        metrics["health/invalid_action_ratio"] = 1 - num_valid / num_turns
    events = (event for trajectory in finished for event in trajectory.events)
    if empty := [bool(event["empty_think"]) for event in events if "empty_think" in event]:
        metrics["health/empty_think_ratio"] = sum(empty) / len(empty)
    return metrics


def repetition(finished: Sequence[Trajectory]) -> dict[str, float]:
    """`health/repetition`: share of policy 4-grams of ids that occur earlier in the same trajectory.

    A 4-gram lies within one turn; the earlier one may be in any turn.
    """
    turns = [
        (row, segment.ids)
        for row, trajectory in enumerate(finished)
        for segment in trajectory.segments
        if segment.source is Source.POLICY and len(segment.ids) >= NGRAM
    ]
    if not turns:
        return {}
    # All turns in one array. A 4-gram starts at each token that has enough tokens after it in its own turn.
    length_K = np.array([len(ids) for _, ids in turns])
    ids_T = np.fromiter(chain.from_iterable(ids for _, ids in turns), np.int64, int(length_K.sum()))
    start_T = np.arange(len(ids_T))
    within_T = start_T + NGRAM <= length_K.cumsum().repeat(length_K)
    # The trajectory of each of these 4-grams: only those of the same trajectory are compared.
    row_N = np.array([row for row, _ in turns]).repeat(length_K - NGRAM + 1)
    return {"health/repetition": 1 - _num_distinct(row_N, ids_T, start_T[within_T]) / len(row_N)}


def equal_rewards(finished: Sequence[Trajectory]) -> dict[str, float]:
    """`health/equal_rewards`: 1 where all trajectories (two or more) have the same reward, else 0.
    `health/zero_variance_groups`: share of the groups of two or more whose rewards are all equal.

    Rewards are compared in float32, as the advantages are made from them.
    """
    rewards_of(finished)
    if len(finished) < 2:
        return {}
    rows = reward_rows(finished)
    reward_B, group_B = rows["reward"], rows["group"]
    metrics = {"health/equal_rewards": float(reward_B.min() == reward_B.max())}
    if num_groups := int((group_B.bincount() > 1).sum()):
        metrics["health/zero_variance_groups"] = int(zero_variance_groups(reward_B, group_B).sum()) / num_groups
    return metrics


def zero_advantages(batch: TrainBatch) -> dict[str, float]:
    """`health/zero_advantages`: share of the loss mask's tokens whose advantage is exactly 0."""
    mask_T = batch.tokens["loss_mask"]
    if "advantages" not in batch.tokens or not bool(mask_T.any()):
        return {}
    return {"health/zero_advantages": float((batch.tokens["advantages"][mask_T] == 0).double().mean())}


def entropy(scores: PolicyScores) -> dict[str, float]:
    """`health/entropy`: mean entropy (nats) over the tokens that have one."""
    if scores.entropy_T is None or not bool(scores.known_T.any()):
        return {}
    return {"health/entropy": float(scores.entropy_T[scores.known_T].double().mean())}


def sampler_mismatch(batch: TrainBatch, scores: PolicyScores) -> dict[str, float]:
    """`health/mismatch...`: how far the trainer's log-probs are from the sampler's on the tokens sampled, in nats.

    With d = trainer - sampler: `mean_abs` is the mean of |d|, `max_abs` its maximum, and `k3` the mean of
    exp(d) - 1 - d (`verl.algorithms.log_probs.mismatch`). `mismatch_turn_{n}` is turn n alone, from 0 as in the events.
    """
    if scores.log_prob_T is None or not bool(scores.known_T.any()):
        return {}
    policy_N = scores.known_T.nonzero().squeeze(-1)  # to read by numbers is several times faster than by a mask
    abs_N, k3_N = mismatch(scores.log_prob_T[policy_N].double() - batch.tokens["rollout_log_probs"][policy_N].double())
    metrics = {
        "health/mismatch/mean_abs": float(abs_N.mean()),
        "health/mismatch/max_abs": float(abs_N.max()),
        "health/mismatch/k3": float(k3_N.mean()),
    }
    # The same for each turn that has tokens, up to MAX_TURNS of them.
    turn_N = batch.turn_of_token_T[policy_N]
    count_K = torch.bincount(turn_N)
    means = {"mean_abs": torch.bincount(turn_N, abs_N) / count_K, "k3": torch.bincount(turn_N, k3_N) / count_K}
    for name, mean_K in means.items():
        for turn in count_K[:MAX_TURNS].nonzero().squeeze(-1).tolist():
            metrics[f"health/mismatch_turn_{turn}/{name}"] = float(mean_K[turn])
    return metrics


def _num_distinct(row_N: npt.NDArray[np.int64], ids_T: npt.NDArray[np.int64], start_N: npt.NDArray[np.int64]) -> int:
    """The number of distinct pairs of row and n-gram; `start_N` says where in `ids_T` an n-gram begins.

    A pair is one number as long as 63 bits hold it: row, then id by id. Before they would not, the numbers so far are
    replaced by their places in sorted order. (numpy sorts faster than its `unique` looks into a hash table.)
    """
    num_ids = int(ids_T.max()) + 1
    number_N, bound = row_N, int(row_N.max()) + 1
    for place in range(NGRAM):
        if bound * num_ids > 2**63:
            number_N, bound = np.searchsorted(np.sort(number_N), number_N), len(number_N)
        number_N, bound = number_N * num_ids + ids_T[start_N + place], bound * num_ids
    return 1 + int(np.count_nonzero(np.diff(np.sort(number_N))))


# The trainer's own log-probs and entropies of the policy that sampled a step.


@dataclass(frozen=True)
class PolicyScores:
    """Log-probs and entropies [T] in nats at the tokens where `known_T` [T] bool is True; None: not computed."""

    known_T: torch.Tensor
    log_prob_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: TrainBatch) -> PolicyScores:
        """The scores of a pass before the update, over all tokens of the loss mask."""
        return cls(batch.tokens["loss_mask"], batch.tokens.get("old_log_probs"), batch.tokens.get("entropy"))
