"""Log-probs and entropies against a plain forward pass on full logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import full_logits, log_softmax_rows, make_batch, make_engine, write_model
from engine_state import full_state, gradients

from verl.engine.batching import merge_rows, selected_tokens
from verl.errors import NumericalError


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_equal_log_softmax_of_full_logits(
    model_path: str, run_dir: Path, temperature: float
) -> None:
    batch = make_batch()
    answer = make_engine(model_path, run_dir).log_probs(batch, temperature)
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


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunk_size_changes_nothing(model_path: str, run_dir: Path, chunk: int) -> None:
    batch = make_batch()
    reference = make_engine(model_path, run_dir, "actor_rollout_ref.actor.head_chunk_tokens=32").log_probs(batch, 1.0)
    answer = make_engine(model_path, run_dir, f"actor_rollout_ref.actor.head_chunk_tokens={chunk}").log_probs(batch, 1)
    torch.testing.assert_close(answer.tokens["log_prob"], reference.tokens["log_prob"], atol=2e-6, rtol=0)
    torch.testing.assert_close(answer.tokens["entropy"], reference.tokens["entropy"], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("log_prob_use_dynamic_bsz=true", "log_prob_max_token_len_per_gpu=60"),
        ("log_prob_use_dynamic_bsz=false", "log_prob_micro_batch_size=3"),
    ],
)
def test_micro_batches_change_nothing(model_path: str, run_dir: Path, overrides: tuple[str, ...]) -> None:
    batch = make_batch()
    reference = make_engine(model_path, run_dir).log_probs(batch, 1.0)
    settings = [f"actor_rollout_ref.rollout.{override}" for override in overrides]
    answer = make_engine(model_path, run_dir, *settings).log_probs(batch, 1.0)
    torch.testing.assert_close(answer.tokens["log_prob"], reference.tokens["log_prob"], atol=2e-6, rtol=0)


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
    with pytest.raises(NumericalError, match="step 0: the policy's log-probs"):
        engine.log_probs(make_batch(), 1.0)
