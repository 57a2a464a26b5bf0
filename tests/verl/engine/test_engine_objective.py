"""Every term of the actor's loss against autograd in float64 on whole logits; what its mask leaves out is not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engine_cases import VOCABULARY, full_logits, log_softmax_rows, make_batch, make_engine, relative_error
from engine_state import gradients

from verl.algorithms.kl import TOPK_KL
from verl.engine.policy_engine import PolicyEngine
from verl.protocol import TrainBatch

ACTOR = "actor_rollout_ref.actor"
SMALL = (f"{ACTOR}.ppo_max_token_len_per_gpu=60", f"{ACTOR}.head_chunk_tokens=5", f"{ACTOR}.entropy_coeff=0")
K = 4


class World(NamedTuple):
    """All logits of a batch, float64: policy (with gradient), anchor, and the sampled token's log-probs."""

    batch: TrainBatch
    log_p_TV: torch.Tensor
    log_q_TV: torch.Tensor

    @property
    def log_p_T(self) -> torch.Tensor:
        return self.log_p_TV.gather(-1, self.batch.tokens["ids"][:, None]).squeeze(-1)

    @property
    def log_q_T(self) -> torch.Tensor:
        return self.log_q_TV.gather(-1, self.batch.tokens["ids"][:, None]).squeeze(-1)

    @property
    def entropy_T(self) -> torch.Tensor:
        return -(self.log_p_TV.exp() * self.log_p_TV).sum(-1)

    @property
    def fall_T(self) -> torch.Tensor:
        return self.batch.tokens["old_log_probs"].double() - self.log_p_T

    @property
    def kl_weight_T(self) -> torch.Tensor:
        """p over the probability of the sampler, within the bounds of `WEIGHTED`."""
        return (self.log_p_T.detach() - self.batch.tokens["rollout_log_probs"].double()).exp().clamp(0.5, 1.5)

    @property
    def advantage_T(self) -> torch.Tensor:
        return self.batch.tokens["advantages"].double()

    def mean(self, loss_T: torch.Tensor) -> torch.Tensor:
        return loss_T[self.batch.tokens["loss_mask"]].mean()

    def rows(self, value_T: torch.Tensor) -> list[torch.Tensor]:
        """The policy tokens' values of each row."""
        lengths = self.batch.lengths_B.tolist()
        masks = self.batch.tokens["loss_mask"].split(lengths)
        return [part[mask] for part, mask in zip(value_T.split(lengths), masks, strict=True)]


def ppo(world: World, highest: float = 1.2) -> torch.Tensor:
    ratio_T = (-world.fall_T).exp()
    return torch.maximum(-world.advantage_T * ratio_T, -world.advantage_T * ratio_T.clamp(0.8, highest))


def with_entropy(world: World) -> torch.Tensor:
    return world.mean(ppo(world, highest=1.28) - 0.01 * world.entropy_T)


Term = Callable[[World], torch.Tensor]


def kl_loss(term: Term) -> Term:
    return lambda world: world.mean(ppo(world) + 0.5 * term(world))


def sampled(estimator: Callable[[torch.Tensor], torch.Tensor]) -> Term:
    return lambda world: estimator(world.log_p_T - world.batch.tokens["ref_log_probs"].double())


def full_reverse(world: World) -> torch.Tensor:
    return (world.log_p_TV.exp() * (world.log_p_TV - world.log_q_TV)).sum(-1)


def full_forward(world: World) -> torch.Tensor:
    return (world.log_q_TV.exp() * (world.log_q_TV - world.log_p_TV)).sum(-1)


def top_k(direction: str, gradient: str, weighted: bool) -> Term:
    def term(world: World) -> torch.Tensor:
        chosen_by = world.log_p_TV.detach() if direction == "full_reverse" else world.log_q_TV
        index_Tk = chosen_by.topk(K).indices
        return TOPK_KL[direction](
            world.log_p_TV.gather(-1, index_Tk),
            world.log_q_TV.gather(-1, index_Tk),
            world.log_p_T,
            world.log_q_T,
            (index_Tk == world.batch.tokens["ids"][:, None]).any(-1),
            gradient=gradient,
            weight_T=world.kl_weight_T if weighted else None,
        )

    return term


def weighted_k4(world: World) -> torch.Tensor:
    # k4 = r sg(l - l_ref); its gradient alone is (l - l_ref) grad l, here times the clipped weight
    log_ratio_T = world.log_p_T - world.batch.tokens["ref_log_probs"].double()
    return world.kl_weight_T * log_ratio_T.detach() * world.log_p_T


def straight_through_k3(world: World) -> torch.Tensor:
    return 0.5 * (world.log_p_T - world.batch.tokens["ref_log_probs"].double()).square()  # the gradient of k2


def llds(world: World) -> torch.Tensor:
    """Turns of each row in make_batch: two, one before and one after the environment's segment."""
    penalty_T = torch.zeros_like(world.fall_T)
    starts_B = world.batch.lengths_B.cumsum(0) - world.batch.lengths_B
    for start, length in zip(starts_B.tolist(), world.batch.lengths_B.tolist(), strict=True):
        mask = world.batch.tokens["loss_mask"][start : start + length].int()
        ends = (mask.diff() == -1).nonzero().flatten() + 1
        turns = [(int((mask.diff() == 1).nonzero()[0]) + 1, int(ends[0]))]
        turns.append((int((mask.diff() == 1).nonzero()[1]) + 1, length))
        for first, last in turns:
            span = slice(start + first, start + last)
            if world.fall_T[span].sum() > 0 and world.advantage_T[span].mean() >= 0:
                penalty_T[span] = world.fall_T[span].relu()
    return world.mean(ppo(world) + 0.5 * penalty_T)


def gspo(world: World) -> torch.Tensor:
    losses = []
    for fall, advantage in zip(world.rows(world.fall_T), world.rows(world.advantage_T), strict=True):
        ratio, adv = (-fall.mean()).exp(), advantage[0]
        losses.append(torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)))
    return torch.stack(losses).mean()


def dr_grpo(world: World) -> torch.Tensor:
    return torch.stack([row.sum() for row in world.rows(ppo(world))]).mean() / 20


def corrected(world: World) -> torch.Tensor:
    return world.mean(ppo(world) * world.batch.tokens["correction"])


def kl_setting(kind: str, *more: str) -> tuple[str, ...]:
    return (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.kl_loss_coef=0.5", *more)


TOP = f"{ACTOR}.kl_topk_tokens={K}"
ONE_STEP_OFF = "trainer.async_rollout=one_step_off"  # the old log-probs are those of older weights
PUBLISHED = f"{ACTOR}.kl_topk_gradient=published"
WEIGHTED = (f"{ACTOR}.use_kl_iw=true", f"{ACTOR}.kl_iw_clip_lower=0.5", f"{ACTOR}.kl_iw_clip_upper=1.5")
# A KL as it is written, of which the mean is a metric as well.
VALUES: dict[str, tuple[tuple[str, ...], Term]] = {
    "k1": (kl_setting("k1"), sampled(lambda d: d)),
    "abs": (kl_setting("abs"), sampled(lambda d: d.abs())),
    "k2": (kl_setting("k2"), sampled(lambda d: d * d / 2)),
    "k3": (kl_setting("k3"), sampled(lambda d: ((-d).exp() + d - 1).clamp(-10, 10))),
    "full_reverse": (kl_setting("full_reverse"), full_reverse),
    "full_forward": (kl_setting("full_forward"), full_forward),
}
# A term that has the KL's gradient, and perhaps not its value.
GRADIENTS: dict[str, tuple[tuple[str, ...], Term]] = {
    "topk_reverse": (kl_setting("full_reverse", TOP), top_k("full_reverse", "corrected", False)),
    "topk_reverse_weighted": (kl_setting("full_reverse", TOP, *WEIGHTED), top_k("full_reverse", "corrected", True)),
    "topk_reverse_published": (kl_setting("full_reverse", TOP, PUBLISHED), top_k("full_reverse", "published", False)),
    "topk_forward": (kl_setting("full_forward", TOP), top_k("full_forward", "corrected", False)),
    "k4_weighted": (kl_setting("k4", *WEIGHTED), weighted_k4),
    "k3+": (kl_setting("k3+"), straight_through_k3),
}
CASES: dict[str, tuple[tuple[str, ...], Term]] = {
    **{name: (settings, kl_loss(term)) for name, (settings, term) in (VALUES | GRADIENTS).items()},
    "entropy": ((f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.clip_ratio_high=0.28"), with_entropy),
    "llds": ((f"{ACTOR}.llds_coef=0.5", f"{ACTOR}.use_rollout_log_probs=true", ONE_STEP_OFF), llds),
    "gspo": ((f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"), gspo),
    "dr_grpo": ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=20"), dr_grpo),
    "rollout_correction": ((), corrected),
}


def case_batch(name: str) -> TrainBatch:
    """Old log-probs near the policy's, so that ratios are on both sides of every clip."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(7)
    if name == "gspo":  # one advantage a row, as every estimator but gae gives
        batch.tokens["advantages"] = torch.randn(len(batch), generator=generator)[batch.row_of_token_T]
    if name == "rollout_correction":
        batch.tokens["correction"] = torch.rand(len(batch.tokens["ids"]), generator=generator)
    return batch


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_metrics(name: str, model_path: str, other_model_path: str, run_dir: Path) -> None:
    overrides, loss = CASES[name]
    batch = case_batch(name)
    engine = make_engine(model_path, run_dir, *SMALL, *overrides, anchor_path=other_model_path)
    found = engine.log_probs(batch, 1.0, top_k=K).tokens
    assert found["top_index"].dtype == torch.int32
    batch.tokens["top_index"] = found["top_index"]
    generator = torch.Generator().manual_seed(8)
    for column in ("old_log_probs", "rollout_log_probs"):
        batch.tokens[column] = found["log_prob"] + 0.3 * torch.randn(len(found["log_prob"]), generator=generator)
    model, logits = full_logits(model_path, batch)
    with torch.no_grad():
        log_q_TV = log_softmax_rows(full_logits(other_model_path, batch)[1], 1.0)
    world = World(batch, log_softmax_rows(logits, 1.0), log_q_TV)
    loss(world).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(gradients(engine, batch), expected) < 1e-5
    means = {"entropy_loss": world.mean(world.entropy_T)}
    if name in VALUES:
        means |= {"pg_loss": world.mean(ppo(world)), "kl_loss": world.mean(VALUES[name][1](world))}
    if name == "entropy":
        means["pg_loss"] = world.mean(ppo(world, highest=1.28))
    metrics = engine.update(batch)
    parts = [value for key, value in metrics.items() if key.startswith("actor/loss_part/")]
    assert len(parts) == (1 if loss in (gspo, dr_grpo, corrected) else 2)
    assert metrics["actor/loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert {key: metrics[f"actor/{key}"] for key in means} == pytest.approx(
        {key: value.item() for key, value in means.items()}, rel=1e-5
    )
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics.get("actor/kl_coef", 0.5) == 0.5 and ("actor/kl_coef" in metrics) == (name in VALUES | GRADIENTS)


PERTURBATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "labels": lambda value: (value + 7) % VOCABULARY,
    "old_log_probs": lambda value: value - 3.0,
    "ref_log_probs": lambda value: value + 2.0,
    "advantages": lambda value: value * -5.0 + 1.0,
}


def labelled_batch() -> TrainBatch:
    batch = make_batch()
    batch.tokens["labels"] = batch.tokens["ids"].clone()
    return batch


def perturbed(batch: TrainBatch, name: str, where_T: torch.Tensor) -> TrainBatch:
    changed = torch.where(where_T, PERTURBATIONS[name](batch.tokens[name]), batch.tokens[name])
    return TrainBatch(batch.lengths_B, batch.tokens | {name: changed}, batch.rows)


@pytest.fixture(scope="module")
def engines(
    model_path: str, other_model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PolicyEngine]:
    """By the kind of their KL. Their weights stay as they are."""
    folder, kl = tmp_path_factory.mktemp("masking"), (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.3")
    return {
        kind: make_engine(model_path, folder, *kl, f"{ACTOR}.kl_loss_type={kind}", anchor_path=other_model_path)
        for kind in ("k3", "full_reverse")
    }


def gradients_are_equal(engine: PolicyEngine, first: TrainBatch, second: TrainBatch) -> bool:
    one, two = gradients(engine, first), gradients(engine, second)
    assert any(gradient.any() for gradient in one.values())
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", PERTURBATIONS)
@pytest.mark.parametrize("kind", ["k3", "full_reverse"])
def test_masked_positions_change_no_bit_of_the_gradient(engines: dict[str, PolicyEngine], name: str, kind: str) -> None:
    batch = labelled_batch()
    changed = perturbed(batch, name, ~batch.tokens["loss_mask"])
    assert not torch.equal(batch.tokens[name], changed.tokens[name])
    assert gradients_are_equal(engines[kind], batch, changed)


@pytest.mark.parametrize("name", PERTURBATIONS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_shifted_by_one_position_is_noticed(engines: dict[str, PolicyEngine], name: str, shift: int) -> None:
    batch = labelled_batch()
    masked_T = ~batch.tokens["loss_mask"]
    rows = [mask.roll(shift) for mask in batch.tokens["loss_mask"].split(batch.lengths_B.tolist())]
    shifted = TrainBatch(batch.lengths_B, batch.tokens | {"loss_mask": torch.cat(rows)}, batch.rows)
    assert not gradients_are_equal(engines["k3"], shifted, perturbed(shifted, name, masked_T))


def test_context_does_reach_the_gradient(engines: dict[str, PolicyEngine]) -> None:
    batch = labelled_batch()
    ids_T = torch.where(batch.tokens["loss_mask"], batch.tokens["ids"], (batch.tokens["ids"] + 7) % VOCABULARY)
    changed = TrainBatch(batch.lengths_B, batch.tokens | {"ids": ids_T}, batch.rows)
    assert not gradients_are_equal(engines["k3"], batch, changed)
