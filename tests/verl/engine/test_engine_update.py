"""What an update does, and what its gradient does not depend on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from engine_cases import full_logits, log_softmax_rows, make_batch, make_engine, relative_error
from engine_state import full_state, gradients

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.engine.batching import selected_tokens
from verl.engine.mini_batches import mini_batches
from verl.errors import ConfigError, NumericalError

ACTOR = "actor_rollout_ref.actor"


def kl_overrides(kind: str, coefficient: float = 0.5) -> list[str]:
    return [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.kl_loss_coef={coefficient}"]


@pytest.fixture(scope="module")
def plain_gradient(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    engine = make_engine(model_path, tmp_path_factory.mktemp("plain"), *kl_overrides("full_reverse"), with_anchor=True)
    return gradients(engine, make_batch(12))


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ACTOR}.ppo_max_token_len_per_gpu=40",),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=80",),
        (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=2"),
        (f"{ACTOR}.head_chunk_tokens=1",),
        (f"{ACTOR}.head_chunk_tokens=11",),
        (f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=1000000",),
    ],
)
def test_gradient_does_not_depend_on_the_plumbing(
    plain_gradient: dict[str, torch.Tensor], model_path: str, run_dir: Path, overrides: tuple[str, ...]
) -> None:
    engine = make_engine(model_path, run_dir, *kl_overrides("full_reverse"), *overrides, with_anchor=True)
    assert relative_error(gradients(engine, make_batch(12)), plain_gradient) < 1e-5


def test_kl_is_divided_by_the_batch_std_of_advantages(model_path: str, run_dir: Path) -> None:
    batch = make_batch()
    batch.rows["adv_batch_std"] = torch.full((len(batch),), 0.25)
    halved = gradients(make_engine(model_path, run_dir, *kl_overrides("k2", 0.1)), batch)
    del batch.rows["adv_batch_std"]
    plain = gradients(make_engine(model_path, run_dir, *kl_overrides("k2", 0.1 / (0.25 + 1e-6))), batch)
    assert relative_error(halved, plain) < 1e-5


def test_equal_rewards_leave_the_kl_as_it_is(model_path: str, run_dir: Path) -> None:
    """There is no deviation to divide by: the KL keeps its weight, as if nothing had been scaled."""
    batch = make_batch(8)  # groups of two
    mask_T, row_T = batch.tokens["loss_mask"], batch.row_of_token_T
    given = AdvantageInput(torch.zeros(len(mask_T)), mask_T, row_T, batch.rows["group"])
    last_B = batch.lengths_B.cumsum(0) - 1  # rows end with a policy token
    given.reward_T[last_B] = 0.8
    found = ADVANTAGES["grpo"](given, AdvantageSettings(scale="batch_std"))
    assert found.batch_std is not None and float(found.batch_std) == 0
    batch.tokens["advantages"] = found.advantage_T
    plain = gradients(make_engine(model_path, run_dir, *kl_overrides("k2", 0.1)), batch)
    batch.rows["adv_batch_std"] = found.batch_std.float().expand(len(batch))
    engine = make_engine(model_path, run_dir, *kl_overrides("k2", 0.1))
    assert relative_error(gradients(engine, batch), plain) < 1e-6
    assert engine.update(batch)["actor/pg_loss"] == 0


def test_mini_batches_epochs_and_clip_fraction(model_path: str, run_dir: Path) -> None:
    batch = make_batch(7)
    settings = [f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true"]
    metrics = make_engine(model_path, run_dir, *settings).update(batch)
    assert metrics["actor/num_updates"] == 4.0  # mini-batches of 4 and 3 rows, twice
    log_p_TV = log_softmax_rows(full_logits(model_path, batch)[1], 1.0)
    log_p_T = log_p_TV.gather(-1, batch.tokens["ids"][:, None]).squeeze(-1)
    metrics = make_engine(model_path, run_dir).update(batch)
    ratio_T = (log_p_T - batch.tokens["old_log_probs"]).exp()
    advantage_T = batch.tokens["advantages"]
    clipped_T = ((ratio_T > 1.2) & (advantage_T > 0)) | ((ratio_T < 0.8) & (advantage_T < 0))
    mask_T = batch.tokens["loss_mask"]
    assert 0.1 < metrics["actor/pg_clipfrac"] < 0.9
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped_T[mask_T].double().mean()), abs=1e-6)
    difference_T = batch.tokens["old_log_probs"] - log_p_T
    assert metrics["actor/ppo_kl"] == pytest.approx(difference_T[mask_T].mean().item(), rel=1e-5)


def test_shuffle_is_seeded_and_given_order_is_kept() -> None:
    assert (
        list(mini_batches([2, 3, 5, 7, 8, 9], 4, epochs=2, shuffle=False, seed=0, step=0))
        == [
            [2, 3, 5],
            [7, 8, 9],
        ]
        * 2
    )
    rows = range(50)
    first, again, later = (list(mini_batches(rows, 4, 1, shuffle=True, seed=3, step=step)) for step in (0, 0, 1))
    assert first == again != list(mini_batches(rows, 4, 1, shuffle=False, seed=3, step=0))
    assert sorted(row for part in first for row in part) == list(rows) and later != first


def test_update_moves_weights_at_the_scheduled_rate(model_path: str, run_dir: Path) -> None:
    batch = make_batch()
    settings = [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.4", f"{ACTOR}.optim.weight_decay=0"]
    engine = make_engine(model_path, run_dir, *settings, total_training_steps=10)
    before = full_state(engine)
    rates = [engine.update(batch)["actor/lr"]]
    moved = max(float((full_state(engine)[n] - before[n]).abs().max()) for n in before)
    assert moved == pytest.approx(2.5e-3, rel=1e-2)  # AdamW's first step is the learning rate: 1e-2 / 4
    rates += [engine.update(batch)["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])


def test_adamw_step_equals_the_formula(model_path: str, run_dir: Path) -> None:
    batch = make_batch()
    optim = [f"{ACTOR}.optim.{item}" for item in ("lr=0.01", "betas=[0.8,0.9]", "eps=1e-4", "weight_decay=0.1")]
    engine = make_engine(model_path, run_dir, *optim, f"{ACTOR}.grad_clip=0.05")
    before, gradient = full_state(engine), gradients(engine, batch)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
    assert norm > 0.05
    engine.update(batch)
    for name, after in full_state(engine).items():
        g = gradient[name].double() * 0.05 / norm
        # one step from zero moments: bias-corrected moments are g and g^2
        expected = before[name].double() * (1 - 0.01 * 0.1) - 0.01 * g / (g.abs() + 1e-4)
        torch.testing.assert_close(after.double(), expected, atol=1e-6, rtol=1e-5)


def test_mini_batch_without_policy_tokens_is_skipped(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir)
    batch = make_batch()
    batch.tokens["loss_mask"] = torch.zeros_like(batch.tokens["loss_mask"])
    before = full_state(engine)
    metrics = engine.update(batch)
    assert metrics["actor/num_updates"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in full_state(engine).items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_saves_the_mini_batch(model_path: str, run_dir: Path, value: float) -> None:
    engine = make_engine(model_path, run_dir)
    batch = make_batch()
    position = int(selected_tokens(batch)[3])
    batch.tokens["advantages"][position] = value
    before = full_state(engine)
    with pytest.raises(NumericalError, match="step 0: loss") as caught:
        engine.update(batch)
    saved = torch.load(run_dir / "failures" / "not_finite_step_0.pt")
    assert str(run_dir / "failures" / "not_finite_step_0.pt") in str(caught.value)
    assert not saved["tokens"]["advantages"][position].isfinite()
    assert torch.equal(saved["tokens"]["ids"], batch.tokens["ids"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state(engine).items())
    batch.tokens["advantages"][position] = 1.0
    assert math.isfinite(engine.update(batch)["actor/grad_norm"])


def test_settings_that_cannot_work_are_named(model_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'full_reverse' needs the anchor"):
        make_engine(model_path, run_dir, *kl_overrides("full_reverse"))
    with pytest.raises(ConfigError, match="policy_loss: expected one of ppo, gspo, cispo, reinforce, got 'nothing'"):
        make_engine(model_path, run_dir, f"{ACTOR}.policy_loss=nothing")
    with pytest.raises(ConfigError, match="fsdp_size is 3"):
        make_engine(model_path, run_dir, f"{ACTOR}.fsdp_config.fsdp_size=3")
    with pytest.raises(ConfigError, match="no config.json"):
        make_engine(str(run_dir / "absent"), run_dir)
    batch = make_batch()
    del batch.tokens["ref_log_probs"]
    with pytest.raises(ValueError, match="no tokens\\['ref_log_probs'\\]"):
        make_engine(model_path, run_dir, *kl_overrides("k3")).update(batch)
