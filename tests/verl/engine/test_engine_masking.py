"""What lies at prompt and environment positions reaches no gradient; only context does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_cases import VOCABULARY, make_batch, make_engine
from engine_state import gradients

from verl.engine.policy_engine import PolicyEngine
from verl.protocol import TrainBatch

ACTOR = "actor_rollout_ref.actor"
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
