"""The KL in the loss where another policy than the trainer's sampled the tokens: its expectation, by enumeration.

One row for each token that the sampler could draw at one position. The sum of their losses, each times the sampler's
probability of its token, is the expected loss; its gradient must be that of the exact KL.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from run_config import run_config

from verl.columns import COLUMNS
from verl.config import ActorConfig
from verl.engine.batching import Layout, model_input
from verl.engine.head import TokenStats
from verl.engine.policy_objective import AnchorReader, build_kl
from verl.protocol import TrainBatch
from verl.workers.roles import ActorGroup

ACTOR = "actor_rollout_ref.actor"
V = 9
CPU = torch.device("cpu")
# Estimators whose gradient is that of KL(p || q) on average, and those of KL(q || p); with k, the Top-k KL.
REVERSE = [("k2", 0), ("k3+", 0), ("k3plusplus", 0), ("k4", 0), ("full_reverse", 1), ("full_reverse", 4)]
FORWARD = [("k3", 0), ("k5", 0), ("full_forward", 1), ("full_forward", 4)]


def normal(seed: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class World:
    """Logits [V] of the policy p now, before the step's first update, and when it sampled; and of the anchor."""

    def __init__(self, kl_of_sampler: float) -> None:
        self.now_V = normal(0, 1.5)
        self.before_V = self.now_V + normal(1, 0.1)
        self.anchor_V = self.now_V + normal(2, 0.4)
        # As float32 holds it, which is what the sampler reports. Its probabilities then add up to 1 within 1e-7.
        self.log_mu_V = (self.before_V + normal(3, kl_of_sampler)).log_softmax(0).float()

    def batch(self) -> TrainBatch:
        """A row of two tokens for each id of the vocabulary, of which the second was sampled."""
        log_before_V = self.before_V.log_softmax(0).float()
        zero_V = torch.zeros(V)
        return TrainBatch(
            torch.full((V,), 2),
            {
                "ids": torch.stack([torch.zeros(V, dtype=torch.int64), torch.arange(V)], 1).flatten(),
                "loss_mask": torch.tensor([False, True]).repeat(V),
                "rollout_log_probs": torch.stack([zero_V, self.log_mu_V], 1).flatten(),
                "old_log_probs": torch.stack([zero_V, log_before_V], 1).flatten(),
            },
        )

    def gradient(self, actor: ActorConfig, batch: TrainBatch) -> torch.Tensor:
        """[V]: that of the expected KL term, with respect to the policy's logits now."""
        logits_V = self.now_V.clone().requires_grad_()
        inputs = model_input(batch, CPU, Layout(packed=True))
        request = build_kl(actor, cast(AnchorReader, Anchor(self.anchor_V)))(batch, inputs)
        stats = statistics(logits_V, inputs.label_N, **request.requested)
        kl_N = request.kl(stats)
        mu_N = batch.tokens["rollout_log_probs"][inputs.token_N].double().exp()
        return torch.autograd.grad((mu_N * kl_N).sum(), logits_V)[0]

    def exact(self, forward: bool) -> torch.Tensor:
        logits_V = self.now_V.clone().requires_grad_()
        log_p_V, log_q_V = logits_V.log_softmax(0), self.anchor_V.log_softmax(0)
        first_V, second_V = (log_q_V, log_p_V) if forward else (log_p_V, log_q_V)
        return torch.autograd.grad((first_V.exp() * (first_V - second_V)).sum(), logits_V)[0]


def statistics(
    logits_V: torch.Tensor, label_N: torch.Tensor, top_k: int = 0, index_Nk: torch.Tensor | None = None
) -> TokenStats:
    """What a model's head computes, in float64: every position has the same logits."""
    log_p_V = logits_V.log_softmax(0)
    log_prob_N = log_p_V[label_N]
    if top_k:
        index_Nk = log_p_V.detach().topk(top_k).indices.expand(len(label_N), -1)
    log_prob_Nk = None if index_Nk is None else log_p_V[index_Nk]
    return TokenStats(log_prob_N, torch.zeros_like(log_prob_N), log_prob_Nk=log_prob_Nk, index_Nk=index_Nk)


class Anchor:
    """Reads the anchor's distribution as `AnchorReader` does."""

    def __init__(self, logits_V: torch.Tensor) -> None:
        self.log_q_V = logits_V.log_softmax(0)

    def labels(self, inputs: Any) -> TokenStats:
        return statistics(self.log_q_V, inputs.label_N)

    def at(self, inputs: Any, index_Nk: torch.Tensor) -> TokenStats:
        return statistics(self.log_q_V, inputs.label_N, index_Nk=index_Nk)

    def top(self, inputs: Any, k: int) -> TokenStats:
        return statistics(self.log_q_V, inputs.label_N, top_k=k)


def actor_of(kind: str, k: int, *more: str) -> ActorConfig:
    """The recipe of asynchronous RL with a KL in the loss."""
    kl = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.use_kl_iw=true")
    top = (f"{ACTOR}.kl_topk_tokens={k}",) if k else ()
    recipe = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=4")
    correction = f"{ACTOR}.rollout_correction.importance=token"
    return run_config([*recipe, correction, *kl, *top, *more]).actor_rollout_ref.actor


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5, 1.0], ids=lambda spread: f"sampler {spread} away")
@pytest.mark.parametrize("scored", ["before the update", "in the update"])
@pytest.mark.parametrize(("kind", "k"), REVERSE + FORWARD)
def test_expected_gradient_is_that_of_the_exact_kl(kind: str, k: int, scored: str, spread: float) -> None:
    world = World(spread)
    batch = world.batch()
    if scored == "in the update":  # one optimizer step: the policy before it is the one of the same pass
        del batch.tokens["old_log_probs"]
    found_V = world.gradient(actor_of(kind, k), batch)
    torch.testing.assert_close(found_V, world.exact((kind, k) in FORWARD), atol=1e-7, rtol=0)


def test_without_the_samplers_log_probs_the_weight_is_that_of_the_policy_before_the_update() -> None:
    world = World(0.5)
    batch = world.batch()
    batch.tokens["old_log_probs"] = batch.tokens.pop("rollout_log_probs")
    actor = actor_of("k4", 0)
    batch.tokens["advantages"] = batch.tokens["old_log_probs"]
    kl = build_kl(actor, cast(AnchorReader, Anchor(world.anchor_V)))
    inputs = model_input(batch, CPU, Layout(packed=True))
    stats = statistics(world.now_V, inputs.label_N)
    weight_N = (stats.log_prob_N - batch.tokens["old_log_probs"][inputs.token_N].double()).exp()
    difference_N = world.now_V.log_softmax(0) - world.anchor_V.log_softmax(0)
    torch.testing.assert_close(kl(batch, inputs).kl(stats), weight_N * difference_N)


def test_an_unlikely_token_has_a_finite_weight_and_the_upper_bound_limits_it() -> None:
    """mu = 1e-16 where p is 1/9: a weight of 1e15, were it not limited to e^20, and to 3 by kl_iw_clip_upper."""
    world = World(0.0)
    world.now_V = torch.zeros(V, dtype=torch.float64)
    world.log_mu_V[2] = -36.8
    difference = float(-torch.tensor(float(V)).log() - world.anchor_V.log_softmax(0)[2])
    for more, weight in (((), torch.tensor(20.0).double().exp().item()), ((f"{ACTOR}.kl_iw_clip_upper=3",), 3.0)):
        batch = world.batch().select([2])
        kl = build_kl(actor_of("k4", 0, *more), cast(AnchorReader, Anchor(world.anchor_V)))
        inputs = model_input(batch, CPU, Layout(packed=True))
        kl_N = kl(batch, inputs).kl(statistics(world.now_V, inputs.label_N))
        assert kl_N.tolist() == pytest.approx([weight * difference], rel=1e-6)


def test_the_ranks_receive_every_column_that_the_actors_loss_reads() -> None:
    """The rest are computed on the ranks, belong to labels other than the ids, or are always sent."""
    made_there = {"loss_weight", "top_index", "labels", "rollout"}
    objective = ("verl.engine.policy_objective.", "verl.engine.policy_objective.")
    read = {
        name
        for columns in COLUMNS.values()
        for name, column in columns.items()
        if any(reader.startswith(objective) for reader in column.readers)
    }
    assert "rollout_log_probs" in read
    assert read - made_there <= {*ActorGroup.learns_from, *ActorGroup.learns_from_rows}
