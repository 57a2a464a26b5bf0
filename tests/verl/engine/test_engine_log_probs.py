"""Log-probs and entropies against a plain forward pass on full logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import full_logits, log_softmax_rows, make_batch, make_engine, write_model
from engine_state import full_state, gradients

from verl.engine.batching import merge_rows, selected_tokens
from verl.engine.policy_engine import PolicyEngine
from verl.errors import NumericalError


@pytest.fixture(scope="module")
def plain(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> PolicyEngine:
    """Its weights stay as they are."""
    return make_engine(model_path, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_equal_log_softmax_of_full_logits(
    plain: PolicyEngine, model_path: str, temperature: float
) -> None:
    batch = make_batch()
    answer = plain.log_probs(batch, temperature)
    log_prob_T = merge_rows(batch.lengths_B, [(answer.rows, answer.tokens["log_prob"])])
    entropy_T = merge_rows(batch.lengths_B, [(answer.rows, answer.tokens["entropy"])])
    log_p_TV = log_softmax_rows(full_logits(model_path, batch)[1], temperature)
    expected_T = log_p_TV.gather(-1, batch.tokens["ids"][:, None]).squeeze(-1)
    token_N = selected_tokens(batch)
    torch.testing.assert_close(log_prob_T[token_N].double(), expected_T[token_N], atol=1e-5, rtol=1e-6)
    expected_entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    torch.testing.assert_close(entropy_T[token_N].double(), expected_entropy_T[token_N], atol=1e-5, rtol=1e-6)
    elsewhere_T = torch.ones(len(log_prob_T), dtype=torch.bool).index_fill(0, token_N, False)
    assert log_prob_T.dtype == torch.float32
    assert not log_prob_T[elsewhere_T].any() and not entropy_T[elsewhere_T].any()


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.head_chunk_tokens=1",),
        ("actor.head_chunk_tokens=7",),
        ("rollout.log_prob_use_dynamic_bsz=true", "rollout.log_prob_max_token_len_per_gpu=60"),
        ("rollout.log_prob_use_dynamic_bsz=false", "rollout.log_prob_micro_batch_size=3"),
    ],
)
def test_chunks_and_micro_batches_change_nothing(
    plain: PolicyEngine, model_path: str, run_dir: Path, overrides: tuple[str, ...]
) -> None:
    batch = make_batch()
    engine = make_engine(model_path, run_dir, *(f"actor_rollout_ref.{override}" for override in overrides))
    answer, expected = engine.log_probs(batch, 1.0), plain.log_probs(batch, 1.0)
    for name in ("log_prob", "entropy"):
        torch.testing.assert_close(answer.tokens[name], expected.tokens[name], atol=2e-6, rtol=0)


def test_untied_head_and_gradient_checkpointing(tmp_path: Path, run_dir: Path) -> None:
    path = write_model(tmp_path / "untied", tied=False)
    batch = make_batch()
    engine = make_engine(path, run_dir)
    assert "lm_head.weight" in full_state(engine)
    plain = gradients(engine, batch)
    setting = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    checkpointed = gradients(make_engine(path, run_dir, setting), batch)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5)


def test_anchor_log_probs_are_the_anchors(model_path: str, other_model_path: str, run_dir: Path) -> None:
    batch = make_batch()
    engine = make_engine(model_path, run_dir, with_anchor=True, anchor_path=other_model_path)
    expected = make_engine(other_model_path, run_dir).log_probs(batch, 1.0)
    torch.testing.assert_close(
        engine.log_probs(batch, 1.0, "anchor").tokens["log_prob"], expected.tokens["log_prob"], atol=0, rtol=0
    )
    assert (engine.log_probs(batch, 1.0).tokens["log_prob"] - expected.tokens["log_prob"]).abs().max() > 0.1


def test_weights_that_are_not_finite_are_an_error(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir)
    with torch.no_grad():
        next(engine.policy.parameters()).fill_(float("nan"))
    with pytest.raises(NumericalError, match="step 1: the policy's log-probs"):
        engine.log_probs(make_batch(), 1.0)
