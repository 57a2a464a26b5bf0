"""The anchor against a recomputation in float64, number by number."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_cases import make_batch, make_engine
from engine_state import full_state

from verl.engine.sharding import local

ACTOR = "actor_rollout_ref.actor"


def test_anchor_equals_a_float64_recomputation_after_200_steps(model_path: str, run_dir: Path) -> None:
    """Steps of the size of AdamW's; that an update is such a step, the next test says."""
    tau, generator = 0.98, torch.Generator().manual_seed(0)
    engine = make_engine(model_path, run_dir, with_anchor=True)
    name = "model.layers.1.mlp.down_proj.weight"
    policy = local(dict(engine.policy.model.named_parameters())[name])
    expected = [float(value) for value in policy.flatten()[:40]]
    start = list(expected)
    for _ in range(200):
        policy += 1e-3 * (torch.rand(policy.shape, generator=generator) - 0.3)
        engine.follow_anchor(tau)
        now = policy.flatten()[:40].tolist()
        expected = [tau * old + (1.0 - tau) * new for old, new in zip(expected, now, strict=True)]
    actual = full_state(engine, "anchor")[name].flatten()[:40].tolist()
    moved = max(abs(a - b) for a, b in zip(expected, start, strict=True))
    assert moved > 1e-2
    assert max(abs(a - b) for a, b in zip(expected, actual, strict=True)) < 1e-6


def test_every_parameter_follows_and_the_next_forward_sees_it(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir, with_anchor=True)
    batch = make_batch()
    start = full_state(engine, "anchor")
    before = engine.log_probs(batch, 1.0, "anchor").tokens["log_prob"]
    engine.update(batch)
    engine.follow_anchor(1.0)
    assert torch.equal(engine.log_probs(batch, 1.0, "anchor").tokens["log_prob"], before)
    engine.follow_anchor(0.25)
    policy, anchor = full_state(engine), full_state(engine, "anchor")
    for name, value in anchor.items():
        expected = 0.25 * start[name].double() + 0.75 * policy[name].double()
        torch.testing.assert_close(value.double(), expected, atol=1e-7, rtol=1e-6)
        assert not torch.equal(value, start[name])
    engine.follow_anchor(0.0)
    after = engine.log_probs(batch, 1.0, "anchor").tokens["log_prob"]
    assert torch.equal(after, engine.log_probs(batch, 1.0).tokens["log_prob"])
    assert not torch.equal(after, before)


def test_exact_kl_uses_the_anchor_as_it_is_now(model_path: str, run_dir: Path) -> None:
    settings = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_reverse"]
    engine = make_engine(model_path, run_dir, *settings, with_anchor=True)
    batch = make_batch()
    assert abs(engine.update(batch)["actor/kl_loss"]) < 1e-6
    assert engine.update(batch)["actor/kl_loss"] > 1e-4
    engine.follow_anchor(0.0)
    assert abs(engine.update(batch)["actor/kl_loss"]) < 1e-6
