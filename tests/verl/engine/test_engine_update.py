"""What an update does and what its gradient does not depend on; learning rates; the anchor; the device settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import full_logits, log_softmax_rows, make_batch, make_engine, relative_error
from engine_state import full_state, gradients
from run_config import run_config

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.config.sections.model import OptimConfig
from verl.engine.batching import RankValues, selected_tokens
from verl.engine.device.runtime import Precision, backend_of, resolve_device, resolve_precision
from verl.engine.device.sharding import local
from verl.engine.learner import Schedule
from verl.engine.micro_batches import mini_batches
from verl.engine.policy_objective import require_old_policy
from verl.errors import ConfigError, NumericalError

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"


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


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_the_last_layers_have_the_gradients_that_they_have_in_the_whole(
    plain_gradient: dict[str, torch.Tensor], model_path: str, run_dir: Path, checkpointing: str
) -> None:
    """All else is frozen: it has no gradient, no moments, and does not change."""
    last = [f"{MODEL}.trained_layers=1", f"{MODEL}.enable_gradient_checkpointing={checkpointing}"]
    engine = make_engine(model_path, run_dir, *kl_overrides("full_reverse"), *last, with_anchor=True)
    of_last = {name: tensor for name, tensor in plain_gradient.items() if name.startswith("model.layers.1.")}
    found = gradients(engine, make_batch(12))
    assert found.keys() == of_last.keys() and relative_error(found, of_last) < 1e-5
    before = full_state(engine)
    engine.update(make_batch(12))
    changed = {name for name, tensor in full_state(engine).items() if not torch.equal(tensor, before[name])}
    assert changed == of_last.keys() and len(engine.learner.optimizer.state) == len(of_last)


def test_more_layers_than_there_are_cannot_be_trained(model_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"trained_layers=3, but \w+ has 2 layers: set fewer"):
        make_engine(model_path, run_dir, f"{MODEL}.trained_layers=3")


def test_kl_is_divided_by_the_batch_std_of_advantages(model_path: str, run_dir: Path) -> None:
    batch = make_batch()
    batch.rows["adv_batch_std"] = torch.full((len(batch),), 0.25)
    halved = gradients(make_engine(model_path, run_dir, *kl_overrides("k2", 0.1)), batch)
    del batch.rows["adv_batch_std"]
    plain = gradients(make_engine(model_path, run_dir, *kl_overrides("k2", 0.1 / (0.25 + 1e-6))), batch)
    assert relative_error(halved, plain) < 1e-5


def test_the_kl_is_reported_in_nats_and_its_part_of_the_loss_as_it_stands_there(model_path: str, run_dir: Path) -> None:
    """d = log p - log q = 2 at every token: k2 is 2 nats, and 2 / 0.05 in a loss whose advantages were so divided."""
    batch = make_batch()
    engine = make_engine(model_path, run_dir, *kl_overrides("k2", 0.1))
    batch.tokens["old_log_probs"] = engine.log_probs(batch, 1.0).tokens["log_prob"]
    batch.tokens["ref_log_probs"] = batch.tokens["old_log_probs"] - 2
    batch.rows["adv_batch_std"] = torch.full((len(batch),), 0.05)
    metrics = engine.update(batch)
    assert metrics["actor/kl_loss"] == pytest.approx(2.0, rel=1e-5)
    assert metrics["actor/loss_part/kl"] == pytest.approx(0.1 * 2.0 / (0.05 + 1e-6), rel=1e-5)
    assert metrics["actor/loss_part/entropy"] == pytest.approx(-0.01 * metrics["actor/entropy_loss"], rel=1e-5)
    parts = ("policy", "entropy", "kl")
    assert metrics["actor/loss"] == pytest.approx(sum(metrics[f"actor/loss_part/{part}"] for part in parts), rel=1e-6)


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


@pytest.mark.parametrize("of_the_sampler", [False, True])
def test_llds_does_not_act_before_an_optimizer_step(model_path: str, run_dir: Path, of_the_sampler: bool) -> None:
    """Old log-probs of the same weights differ by rounding, or, in low precision, by far more than that of float32."""
    batch = make_batch(8)
    scorer = make_engine(model_path, run_dir, f"{ACTOR}.use_prefix_grouper=false", f"{ACTOR}.head_chunk_tokens=5")
    noise_T = torch.randn(len(batch.tokens["ids"]), generator=torch.Generator().manual_seed(0))
    for noise in (0.0, 1e-3):
        batch.tokens["old_log_probs"] = scorer.log_probs(batch, 1.0).tokens["log_prob"] + noise * noise_T
        source = f"{ACTOR}.use_rollout_log_probs={of_the_sampler}"
        with_it = make_engine(model_path, run_dir, source, f"{ACTOR}.llds_coef=1")
        without = make_engine(model_path, run_dir, source)
        assert with_it.update(batch)["actor/llds_loss"] == 0
        without.update(batch)
        for name, weight in full_state(without).items():
            assert torch.equal(weight, full_state(with_it)[name]), name


@pytest.mark.parametrize(
    ("overrides", "acts"),
    [
        ((f"{ACTOR}.ppo_mini_batch_size=4",), True),  # in the second mini-batch
        ((f"{ACTOR}.ppo_epochs=2",), True),
        ((f"{ACTOR}.use_rollout_log_probs=true", "trainer.async_rollout=one_step_off"), True),  # of older weights
        ((), False),
    ],
)
def test_llds_acts_on_what_an_optimizer_step_did(
    model_path: str, run_dir: Path, overrides: tuple[str, ...], acts: bool
) -> None:
    batch = make_batch(8)
    batch.tokens["advantages"] = batch.tokens["advantages"].abs()
    engine = make_engine(model_path, run_dir, f"{ACTOR}.llds_coef=1", *overrides)
    noise_T = 0.1 * torch.randn(len(batch.tokens["ids"]), generator=torch.Generator().manual_seed(0))
    batch.tokens["old_log_probs"] = engine.log_probs(batch, 1.0).tokens["log_prob"] + noise_T
    assert (engine.update(batch)["actor/llds_loss"] > 0) == acts


def test_a_turn_of_which_a_token_is_left_out_has_one_gate(model_path: str, run_dir: Path) -> None:
    """Its first token fell a little, and those behind the one that is left out rose by more: as a whole it rose."""
    batch = make_batch(8)
    older_weights = (f"{ACTOR}.use_rollout_log_probs=true", "trainer.async_rollout=one_step_off")
    engine = make_engine(model_path, run_dir, f"{ACTOR}.llds_coef=1", *older_weights)
    mask_T = batch.tokens["loss_mask"]
    first_T = mask_T & ~mask_T.roll(1)
    second_T = mask_T & first_T.roll(1)
    batch.tokens["old_log_probs"] = engine.log_probs(batch, 1.0).tokens["log_prob"] + torch.where(first_T, 0.1, -1.0)
    batch.tokens["advantages"] = batch.tokens["advantages"].abs()
    between_T = second_T & mask_T.roll(-1)
    assert between_T.any()
    batch.tokens["loss_mask"] = mask_T & ~between_T
    assert engine.update(batch)["actor/llds_loss"] == 0


@pytest.mark.parametrize(
    ("kl", "needed"),
    [
        ((), ["old_log_probs"]),
        (kl_overrides("full_forward"), ["old_log_probs"]),
        ([*kl_overrides("full_forward"), f"{ACTOR}.kl_topk_tokens=4"], ["old_log_probs"]),  # those of the anchor
        (kl_overrides("full_reverse"), ["old_log_probs"]),
        ([*kl_overrides("full_reverse"), f"{ACTOR}.kl_topk_tokens=4"], ["old_log_probs", "top_index"]),
    ],
)
def test_several_optimizer_steps_need_what_is_of_the_policy_before_the_first(
    kl: Sequence[str], needed: list[str]
) -> None:
    actor = run_config([*kl, f"{ACTOR}.ppo_epochs=2"]).actor_rollout_ref.actor
    batch = make_batch(2)
    top_Tk = torch.zeros(len(batch.tokens["ids"]), 4, dtype=torch.int32)
    tokens = {"old_log_probs": batch.tokens["old_log_probs"], "top_index": top_Tk}
    for missing in needed:
        batch.tokens = batch.tokens | {name: tokens[name] for name in needed if name != missing}
        batch.tokens.pop(missing, None)
        with pytest.raises(ValueError, match=f"need tokens.'{missing}'"):
            require_old_policy(actor, batch, None, num_steps=2)
        require_old_policy(actor, batch, None, num_steps=1)
    batch.tokens = batch.tokens | {name: tokens[name] for name in needed}
    require_old_policy(actor, batch, None, num_steps=2)
    batch.tokens.pop("old_log_probs")
    own = RankValues([0, 1], {"old_log_probs": tokens["old_log_probs"]})  # as a rank has top_index
    require_old_policy(actor, batch, own, num_steps=2)


def test_shuffle_is_seeded_and_given_order_is_kept() -> None:
    given = list(mini_batches([2, 3, 5, 7, 8, 9], 4, epochs=2, shuffle=False, seed=0, step=0))
    assert given == 2 * [[2, 3, 5], [7, 8, 9]]
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
    with pytest.raises(NumericalError, match="step 1: loss") as caught:
        engine.update(batch)
    saved = torch.load(run_dir / "failures" / "not_finite_step_1.pt")
    assert str(run_dir / "failures" / "not_finite_step_1.pt") in str(caught.value)
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


def optim(**values: Any) -> OptimConfig:
    return OptimConfig(**({"lr": 1e-3} | values))


def test_warm_up_then_constant() -> None:
    schedule = Schedule.from_config(optim(lr_warmup_steps_ratio=0.4), 10)  # 4 steps of warm-up
    rates = [schedule.at(step) for step in range(7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3])


def test_the_published_warm_up_length() -> None:
    schedule = Schedule.from_config(optim(lr=1e-6, lr_warmup_steps_ratio=0.285), 1005)
    assert schedule.warmup_steps == 286
    assert schedule.at(0) == pytest.approx(1e-6 / 286)
    assert schedule.at(285) == schedule.at(1004) == 1e-6


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert Schedule.from_config(optim(), 10).at(0) == 1e-3


def test_cosine_falls_to_its_minimum() -> None:
    schedule = Schedule.from_config(optim(warmup_style="cosine", lr_warmup_steps_ratio=0.2, min_lr_ratio=0.1), 10)
    assert [schedule.at(step) for step in (0, 1, 2)] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert schedule.at(6) == pytest.approx(0.55e-3)  # half-way: 0.1 + 0.9 / 2
    assert schedule.at(4) == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert schedule.at(10) == schedule.at(50) == pytest.approx(0.1e-3)
    assert Schedule.from_config(optim(warmup_style="cosine"), 4).at(4) == pytest.approx(0.0)


def test_bad_schedules_are_named() -> None:
    """By the type and the bounds of the setting, before there is an engine."""
    key = "actor_rollout_ref.actor.optim"
    with pytest.raises(ConfigError, match="optim.warmup_style: expected one of constant, cosine, got 'linear'"):
        run_config([f"{key}.warmup_style=linear"])
    with pytest.raises(ConfigError, match="optim.lr_warmup_steps_ratio: must be at most 1, got 3"):
        run_config([f"{key}.lr_warmup_steps_ratio=3"])


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "avx512_f"])
def test_device_and_precision(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = resolve_device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True, "cpu_name": "some"})
    large = resolve_precision(cpu, "auto", "float32", 100_000_000).param_dtype
    assert large is (torch.float32 if flag == "avx512_f" else torch.bfloat16)
    assert resolve_precision(cpu, "float32", "float32", 100_000_000).param_dtype is torch.float32
    assert cpu == torch.device("cpu") and backend_of(cpu) == "gloo"
    assert resolve_precision(cpu, "auto", "float32", 1_000_000) == Precision(torch.float32, torch.float32)
    assert resolve_precision(torch.device("cuda"), "auto", "float32", 1_000_000).param_dtype is torch.bfloat16
    assert backend_of(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ConfigError, match="device 'tpu'"):
        resolve_device("tpu")
    with pytest.raises(ConfigError, match="number format 'int8'"):
        resolve_precision(cpu, "int8", "float32", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_a_device() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")


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
