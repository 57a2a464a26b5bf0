"""Old log-probs, entropy and Top-k tokens from the update's own forward pass, against a pass of their own before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import VOCABULARY, full_logits, log_softmax_rows, make_batch, make_engine, relative_error
from engine_state import full_state, gradients
from transformers import AutoConfig, AutoModelForCausalLM

from verl.engine.batching import merge_rows
from verl.protocol import TrainBatch

ACTOR = "actor_rollout_ref.actor"
K = 4
# AdamW divides by the gradient's own size: with a large eps, rounding is not blown up to a whole step
SMALL = (f"{ACTOR}.ppo_max_token_len_per_gpu=60", f"{ACTOR}.head_chunk_tokens=5", f"{ACTOR}.optim.eps=1e-2")
PADDED = "actor_rollout_ref.model.use_remove_padding=false"


def kl(kind: str, *more: str) -> tuple[str, ...]:
    return (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.kl_loss_coef=0.5", *more)


TOP = f"{ACTOR}.kl_topk_tokens={K}"
CASES = {
    "no KL": (),
    "sampled": kl("low_var_kl"),
    "top-k": kl("full_reverse", TOP),
    "top-k, weighted": kl("full_reverse", TOP, f"{ACTOR}.use_kl_iw=true"),
    "top-k forward": kl("full_forward", TOP),
    "exact": kl("full_reverse"),
    "gspo": (f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
}


def before(batch: TrainBatch, found: dict[str, torch.Tensor]) -> TrainBatch:
    """The batch with what was found of the policy before its update."""
    added = {"old_log_probs": found["log_prob"], "top_index": found["top_index"]}
    return TrainBatch(batch.lengths_B, batch.tokens | added, batch.rows)


def without_scores(batch: TrainBatch) -> TrainBatch:
    tokens = {name: value_T for name, value_T in batch.tokens.items() if name != "old_log_probs"}
    return TrainBatch(batch.lengths_B, tokens, batch.rows)


@pytest.mark.parametrize(
    ("name", "padding"), [*((name, ()) for name in CASES), ("top-k, weighted", (PADDED,)), ("exact", (PADDED,))]
)
def test_the_same_step(
    name: str, padding: tuple[str, ...], model_path: str, other_model_path: str, run_dir: Path
) -> None:
    batch = without_scores(make_batch())
    settings = (*SMALL, *padding, *CASES[name])
    engines = [make_engine(model_path, run_dir, *settings, anchor_path=other_model_path) for _ in range(2)]
    found = engines[0].log_probs(batch, 1.0, top_k=K).tokens
    scored = before(batch, found)
    assert relative_error(gradients(engines[1], batch), gradients(engines[0], scored)) < 1e-6
    expected = engines[0].update(scored)
    metrics, (rows, scores) = engines[1].update_and_score(batch)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6) and metrics["actor/ppo_kl"] == 0
    assert relative_error(full_state(engines[1]), full_state(engines[0])) < 1e-6
    assert rows == list(range(len(batch)))
    for score in ("log_prob", "entropy"):
        torch.testing.assert_close(scores[score], found[score], atol=1e-5, rtol=1e-5)


RANDOM_IN_TRAINING = {
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},  # its router also samples experts
    "opt": {"layerdrop": 0.5, "ffn_dim": 64, "dropout": 0.5},
}


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("family", RANDOM_IN_TRAINING)
def test_a_pass_that_trains_draws_no_random_numbers(family: str, checkpointing: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4, "pad_token_id": None}
    config = AutoConfig.for_model(family, **sizes, **others, **RANDOM_IN_TRAINING[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    setting = f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}"
    engine = make_engine(str(tmp_path / "model"), tmp_path / "run", setting)
    batch = without_scores(make_batch())
    read = engine.log_probs(batch, 1.0).tokens["log_prob"]
    _, scores = engine.update_and_score(batch)
    torch.testing.assert_close(scores.tokens["log_prob"], read, atol=1e-5, rtol=1e-5)
    assert any(module.training for module in engine.model.modules()) is (checkpointing == "true")


def test_the_gradient_is_that_of_the_definition(model_path: str, run_dir: Path) -> None:
    """Autograd in float64 on whole logits: the ratio to the policy itself, held fixed, is 1, its gradient is not 0."""
    batch = without_scores(make_batch())
    engine = make_engine(model_path, run_dir, *SMALL, f"{ACTOR}.entropy_coeff=0")
    model, logits = full_logits(model_path, batch)
    log_p_T = log_softmax_rows(logits, 1.0).gather(-1, batch.tokens["ids"][:, None]).squeeze(-1)
    ratio_T = (log_p_T - log_p_T.detach()).exp()
    (-ratio_T * batch.tokens["advantages"])[batch.tokens["loss_mask"]].mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(gradients(engine, batch), expected) < 1e-5


def test_scores_are_of_the_trained_tokens(model_path: str, run_dir: Path) -> None:
    """A row without a trained token is in no mini-batch; of the others only what the mask leaves is found."""
    batch = without_scores(make_batch(3))
    start, end = batch.lengths_B[:1].sum(), batch.lengths_B[:2].sum()
    batch.tokens["loss_mask"][start:end] = False
    kept = int(batch.tokens["loss_mask"].nonzero()[0])
    batch.tokens["loss_mask"][kept] = False
    engine = make_engine(model_path, run_dir)
    expected = engine.log_probs(batch, 1.0).tokens["log_prob"]
    rows, scores = engine.update_and_score(batch)[1]
    assert rows == [0, 2]
    merged = merge_rows(batch.lengths_B, [(rows, scores["log_prob"])])
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)
    assert merged[kept] == 0 and not merged[start:end].any() and merged.any()


def test_nothing_to_train_on(model_path: str, run_dir: Path) -> None:
    batch = without_scores(make_batch(2))
    batch.tokens["loss_mask"][:] = False
    engine = make_engine(model_path, run_dir, *kl("k2"), anchor_path=model_path)
    metrics, (rows, scores) = engine.update_and_score(batch)
    assert metrics["actor/num_updates"] == 0 and rows == []
    assert {name: len(value_T) for name, value_T in scores.items()} == {"log_prob": 0, "entropy": 0}


@pytest.mark.parametrize("padding", [(), (PADDED,)], ids=["packed", "padded"])
def test_the_anchor_is_read_in_the_update(
    padding: tuple[str, ...], model_path: str, other_model_path: str, run_dir: Path
) -> None:
    """The step is that of a pass over the anchor before the update; two mini-batches, so that the policy moves."""
    batch = make_batch()
    settings = (*SMALL, *padding, *kl("k2"), f"{ACTOR}.ppo_mini_batch_size=3")
    engines = [make_engine(model_path, run_dir, *settings, anchor_path=other_model_path) for _ in range(2)]
    batch.tokens["ref_log_probs"] = engines[0].log_probs(batch, 1.0, "anchor").tokens["log_prob"]
    expected = engines[0].update(batch)
    del batch.tokens["ref_log_probs"]
    metrics = engines[1].update(batch)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics["actor/num_updates"] == 2 and metrics["actor/kl_loss"] > 0.1
    assert relative_error(full_state(engines[1]), full_state(engines[0])) < 1e-6
    engines[1].follow_anchor(0.5)  # what is read next is what the anchor is then
    moved, followed = engines[1].update(batch), full_state(engines[1], "anchor")
    assert moved["actor/kl_loss"] < metrics["actor/kl_loss"]
    assert relative_error(full_state(engines[1], "anchor"), followed) == 0


@pytest.mark.parametrize("steps", [f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_mini_batch_size=3"])
def test_after_an_optimizer_step_it_is_too_late(
    steps: str, model_path: str, other_model_path: str, run_dir: Path
) -> None:
    batch, settings = make_batch(), (*kl("full_reverse", TOP), steps)
    engine = make_engine(model_path, run_dir, *settings, anchor_path=other_model_path)
    with pytest.raises(ValueError, match=r"need tokens\['top_index'\] of the policy before the first one"):
        engine.update(batch)
    with pytest.raises(ValueError, match=r"need tokens\['old_log_probs'\]"):
        engine.update(without_scores(batch))
    with pytest.raises(ValueError, match="2 optimizer steps have no log-probs of one policy"):
        engine.update_and_score(batch)


def test_two_ranks(tmp_path: Path, model_path: str, other_model_path: str) -> None:
    """Each finds the scores of the rows that it trains on; the step is that of a pass before it."""
    ranks = engine_workers.run(tmp_path, model_path, other_model_path, 2, engine_workers.score_in_update)
    batch = make_batch(12)
    for name in ("log_prob", "entropy"):
        found, expected = (
            merge_rows(batch.lengths_B, [(rank[where][0], rank[where][1][name]) for rank in ranks])
            for where in ("scores", "before")
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sorted(ranks[0]["scores"][0] + ranks[1]["scores"][0]) == list(range(12))
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(rank["expected"], rel=1e-5, abs=1e-6)
    weights: list[dict[str, Any]] = [ranks[0][name] for name in ("weights", "expected_weights")]
    assert relative_error(*weights) < 1e-6


@pytest.mark.parametrize("batch_std", [None, 2.0])
def test_the_kl_of_each_token(batch_std: float | None, model_path: str, other_model_path: str, run_dir: Path) -> None:
    """The sum over the vocabulary of p (log p - log q), in float64; the scale of the advantages is no part of it."""
    batch = without_scores(make_batch())
    if batch_std is not None:
        batch.rows["adv_batch_std"] = torch.full((len(batch),), batch_std)
    engine = make_engine(model_path, run_dir, *SMALL, *kl("full_reverse"), anchor_path=other_model_path)
    log_p_TV, log_q_TV = (
        log_softmax_rows(full_logits(path, batch)[1], 1.0).detach().double() for path in (model_path, other_model_path)
    )
    expected_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1) * batch.tokens["loss_mask"]
    found = engine.update_and_score(batch, names=("kl",))[1].tokens
    assert set(found) == {"kl"} and expected_T.max() > 0.1
    torch.testing.assert_close(found["kl"].double(), expected_T, atol=1e-5, rtol=1e-4)


def test_the_kl_of_several_optimizer_steps(model_path: str, other_model_path: str, run_dir: Path) -> None:
    """Of the first epoch: with one mini-batch an epoch that is the policy before the update."""
    batch, settings = make_batch(), (*SMALL, *kl("k1"), f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.1")
    engine = make_engine(model_path, run_dir, *settings, anchor_path=other_model_path)
    batch.tokens.pop("ref_log_probs", None)
    before = [engine.log_probs(batch, 1.0, of).tokens["log_prob"] for of in ("policy", "anchor")]
    metrics, (_, found) = engine.update_and_score(batch, names=("kl",))
    assert metrics["actor/num_updates"] == 2
    torch.testing.assert_close(found["kl"], before[0] - before[1], atol=1e-5, rtol=1e-5)
    after = engine.log_probs(batch, 1.0).tokens["log_prob"]
    assert (after - before[0]).abs().max() > 1e-3  # the second epoch saw another policy
