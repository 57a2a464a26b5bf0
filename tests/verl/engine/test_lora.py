"""Adapters: the definition in float64, what is trained, the reference for free, several workers, and files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import full_logits, log_softmax_rows, make_batch, make_engine, relative_error
from engine_state import assert_same_weights, full_state, gradients, save_state, whole
from engine_workers import KL
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from value_cases import defined_values, value_batch, value_engine, weights, write_critic

from verl.engine.lora import Lora, LoraLinear, merge
from verl.engine.policy_engine import PolicyEngine
from verl.errors import CheckpointError, ConfigError
from verl.process.storage import digest

MODEL = "actor_rollout_ref.model"
IN_BFLOAT16 = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16"


def make(model_path: str, run_dir: Path, *overrides: str, rank: int = 4) -> PolicyEngine:
    return make_engine(model_path, run_dir, f"{MODEL}.lora_rank={rank}", *overrides, with_anchor=True)


def copy_of(model_path: str, tmp_path: Path) -> str:
    """The same model under another path, which is loaded beside the policy."""
    return str(shutil.copytree(model_path, tmp_path / "copy"))


def trained(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in engine.policy.model.named_parameters() if p.requires_grad}


def log_probs(engine: PolicyEngine, of: str = "policy") -> torch.Tensor:
    return engine.log_probs(make_batch(), 1.0, of).tokens["log_prob"]


def test_a_layer_by_hand() -> None:
    """W = [1 2], A = [3 4], B = [5], alpha / r = 2: W + 2 B A = [31 42]."""
    base = nn.Linear(2, 1, bias=False)
    layer = LoraLinear(base, Lora(1, 2.0, "all-linear"))
    for parameter, values in ((layer.weight, [[1, 2]]), (layer.lora_A, [[3, 4]]), (layer.lora_B, [[5]])):
        parameter.data = torch.tensor(values, dtype=torch.float32)
    assert layer(torch.tensor([[1.0, 1.0]])).item() == 73
    assert merge(layer.weight, 2 * layer.lora_B, layer.lora_A).tolist() == [[31, 42]]
    layer.adapter_is_on = False
    assert layer(torch.tensor([[1.0, 1.0]])).item() == 3


def test_forward_and_gradient_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(5, 3), Lora(2, 7.0, "all-linear")).double()
    W, b, A, B = (torch.randn_like(p).requires_grad_() for p in (layer.weight, layer.bias, layer.lora_A, layer.lora_B))
    for parameter, values in ((layer.weight, W), (layer.bias, b), (layer.lora_A, A), (layer.lora_B, B)):
        parameter.data = values.detach().clone()
    inputs, out_grad = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected = inputs @ (W + 7.0 / 2 * B @ A).T + b
    found = layer(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward(out_grad)
    expected.backward(out_grad)
    torch.testing.assert_close(layer.lora_A.grad, A.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.lora_B.grad, B.grad, rtol=1e-12, atol=1e-12)


def test_an_engine_begins_as_its_base_and_trains_adapters_alone(model_path: str, run_dir: Path) -> None:
    plain, engine = make_engine(model_path, run_dir), make(model_path, run_dir)
    assert torch.equal(log_probs(engine), log_probs(plain))
    base, before = full_state(plain), trained(engine)
    engine.update(make_batch())
    engine.update(make_batch(seed=1))
    after = trained(engine)
    assert len(after) == 2 * 2 * 7 and all(not torch.equal(after[name], before[name]) for name in after)
    for name, parameter in engine.policy.model.named_parameters():
        assert name in after or torch.equal(whole(parameter), base[name]), name
    assert len(engine.learner.optimizer.state) == len(after)


def test_the_gradient_is_the_whole_weights_gradient_times_the_other_factor(model_path: str, run_dir: Path) -> None:
    """With s = alpha / r: dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, where W is the merged weight."""
    engine = make(model_path, run_dir, f"{MODEL}.lora_alpha=6")
    engine.update(make_batch(seed=1))
    engine.save_pretrained(run_dir / "merged", None)
    whole_gradient = gradients(make_engine(str(run_dir / "merged"), run_dir), make_batch())
    found, values, expected = gradients(engine, make_batch()), trained(engine), {}
    for name in found:
        layer, _, part = name.rpartition(".")
        dW = whole_gradient[f"{layer}.weight"].double()
        A, B = (values[f"{layer}.{which}"].double() for which in ("lora_A", "lora_B"))
        expected[name] = 6 / 4 * (dW @ A.T if part == "lora_B" else B.T @ dW)
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("kl", [("full_reverse", 0), ("full_forward", 4), ("low_var_kl", 0)])
def test_a_reference_without_adapters_is_one_that_was_loaded(
    kl: tuple[str, int], model_path: str, run_dir: Path, tmp_path: Path
) -> None:
    """To the bit: its log-probs, and what a KL to it in the loss makes of the policy."""
    actor = "actor_rollout_ref.actor"
    settings = (f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_type={kl[0]}", f"{actor}.kl_loss_coef=0.3")
    settings += (f"{actor}.kl_topk_tokens={kl[1]}", f"{MODEL}.enable_gradient_checkpointing=true")
    free = make(model_path, run_dir, *settings)
    beside = make(model_path, run_dir, *settings, f"actor_rollout_ref.ref.path={copy_of(model_path, tmp_path)}")
    assert not list(set(free.anchor.parameters()) - set(free.policy.parameters()))
    for seed in range(2):
        assert free.update(make_batch(seed=seed)) == beside.update(make_batch(seed=seed))
        assert torch.equal(log_probs(free, "anchor"), log_probs(beside, "anchor"))
    assert not torch.equal(log_probs(free), log_probs(free, "anchor"))
    assert_same_weights(free, beside)
    for call in (partial(free.follow_anchor, 0.9), partial(free.save_pretrained, tmp_path / "anchor", None, "anchor")):
        with pytest.raises(ValueError, match="it cannot move, be loaded or be saved"):
            call()


def test_a_moving_anchor_follows_the_merged_weights(model_path: str, run_dir: Path) -> None:
    """Not A and B by themselves: the mean of products is not the product of means."""
    engine = make(model_path, run_dir, *KL, "algorithm.ref_policy_ema_tau=0.75")
    expected = {name: tensor.double() for name, tensor in full_state(engine, "anchor").items()}
    for seed in range(3):
        engine.update(make_batch(seed=seed))
        engine.follow_anchor(0.75)
        expected = {name: 0.75 * expected[name] + 0.25 * merged for name, merged in full_state(engine).items()}
    found = full_state(engine, "anchor")
    assert all(torch.allclose(found[name].double(), expected[name], rtol=1e-6, atol=1e-7) for name in expected)


def test_a_frozen_base_is_kept_in_the_format_of_the_forward_pass(model_path: str, run_dir: Path) -> None:
    engine = make(model_path, run_dir, IN_BFLOAT16)
    formats = {(p.dtype, p.requires_grad) for p in engine.policy.parameters()}
    assert formats == {(torch.bfloat16, False), (torch.float32, True)}
    assert torch.equal(log_probs(engine), log_probs(make_engine(model_path, run_dir, IN_BFLOAT16)))
    engine.update(make_batch())
    state = full_state(engine)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    base, values = full_state(make_engine(model_path, run_dir)), trained(engine)
    name = "model.layers.0.mlp.up_proj"
    added = 16 / 4 * values[f"{name}.lora_B"] @ values[f"{name}.lora_A"]
    assert torch.allclose(state[f"{name}.weight"], base[f"{name}.weight"].bfloat16().float() + added, atol=1e-6)


def test_targets_by_name(model_path: str, run_dir: Path) -> None:
    engine = make(model_path, run_dir, f"{MODEL}.target_modules=[q_proj,mlp.down_proj]")
    layers = {name.rpartition(".")[0] for name in trained(engine)}
    assert layers == {f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")}


def test_adapters_of_the_last_layers(model_path: str, run_dir: Path) -> None:
    engine = make(model_path, run_dir, f"{MODEL}.target_modules=[q_proj]", f"{MODEL}.trained_layers=1")
    assert {name.rpartition(".")[0] for name in trained(engine)} == {"model.layers.1.self_attn.q_proj"}
    with pytest.raises(ConfigError, match=r"no linear layer layers.0.self_attn.q_proj"):
        make(model_path, run_dir, f"{MODEL}.target_modules=[layers.0.self_attn.q_proj]", f"{MODEL}.trained_layers=1")


@pytest.mark.parametrize("targets", ["[q_proj,key]", "proj", "[lm_head]"])
def test_an_unknown_target_is_told_with_what_there_is(targets: str, model_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layer.*down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_"):
        make(model_path, run_dir, f"{MODEL}.target_modules={targets}")


def test_adapters_do_not_depend_on_where_the_base_is_read_from(model_path: str, run_dir: Path, tmp_path: Path) -> None:
    """By the seed alone; also of a model that must be loaded whole, which has other files."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    shutil.copy(Path(model_path) / "config.json", tmp_path)
    engines = [make(path, run_dir) for path in (model_path, str(tmp_path))]
    engines.append(make(model_path, run_dir, "trainer.seed=1"))
    first, whole_model, other_seed = (trained(engine) for engine in engines)
    assert all(torch.equal(first[name], whole_model[name]) for name in first)
    name = "model.layers.1.self_attn.k_proj.lora_A"
    assert not torch.equal(first[name], other_seed[name])
    assert 0.9 < first[name].abs().max() * 32**0.5 <= 1


@pytest.mark.parametrize(
    ("workers", "sharding"),
    [(2, ()), (2, engine_workers.shared_by(2)), pytest.param(4, engine_workers.IN_PAIRS, marks=pytest.mark.slow)],
)
def test_several_workers_give_what_one_does(
    workers: int, sharding: tuple[str, ...], model_path: str, other_model_path: str, tmp_path: Path
) -> None:
    paths = (model_path, other_model_path)
    one = engine_workers.alone(engine_workers.adapt, *paths)
    two = engine_workers.run(tmp_path, *paths, workers, partial(engine_workers.adapt, sharding=sharding))[0]
    for case, gradient in one["gradients"].items():
        assert relative_error(two["gradients"][case], gradient) < 1e-5, case
    for mine, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    assert relative_error(two["policy"], one["policy"]) < 1e-3
    assert all(torch.equal(tensor, one["anchor"][name]) for name, tensor in two["anchor"].items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(parameter, two["policy"][name]) for name, parameter in saved.named_parameters())
    assert one["base"] == two["base"], "the checksum of the base does not depend on the sharding"


def train(engine: PolicyEngine, steps: range) -> list[dict[str, float]]:
    return [engine.update(make_batch(seed=step)) for step in steps]


def test_what_is_saved_is_the_merged_model_and_peft_s_adapter(model_path: str, run_dir: Path) -> None:
    engine, batch = make(model_path, run_dir, f"{MODEL}.lora_alpha=6"), make_batch()
    train(engine, range(2))
    engine.save_pretrained(run_dir / "saved", None)
    _, logits = full_logits(str(run_dir / "saved"), batch)
    chosen_T = log_softmax_rows(logits, 1.0).gather(-1, batch.tokens["ids"][:, None]).squeeze(-1)
    mask_T = batch.tokens["loss_mask"].bool()
    torch.testing.assert_close(log_probs(engine)[mask_T].double(), chosen_T[mask_T], rtol=1e-4, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "saved", dtype=torch.float32)
    state = full_state(engine)
    assert {name for name, _ in merged.named_parameters()} == state.keys(), "no adapter among the merged weights"
    assert all(torch.equal(parameter, state[name]) for name, parameter in merged.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run_dir / "saved" / "adapter")
    for name, parameter in adapted.merge_and_unload().named_parameters():
        torch.testing.assert_close(parameter, state[name], rtol=1e-5, atol=1e-6)
    assert adapted.peft_config["default"].base_model_name_or_path == model_path


@pytest.mark.parametrize("forward", [(), (IN_BFLOAT16,)], ids=["float32", "bfloat16"])
def test_adapters_on_a_base_stored_in_bfloat16_are_saved_in_float32(
    forward: tuple[str, ...], model_path: str, run_dir: Path, tmp_path: Path
) -> None:
    """The merged weights are W + alpha / r B A in float32: rounded to the base's format they would be others."""
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    engine = make(str(tmp_path / "base"), run_dir, *forward)
    train(engine, range(3))
    engine.save_pretrained(run_dir / "saved", None)
    saved, adapter = (
        load_file(run_dir / "saved" / name) for name in ("model.safetensors", "adapter/adapter_model.safetensors")
    )
    assert {tensor.dtype for tensor in (*saved.values(), *adapter.values())} == {torch.float32}
    lost = 0
    for name, weight in base.state_dict().items():
        if name not in saved:
            assert name == "lm_head.weight", "tied to the embedding"
            continue
        factors = [adapter.get(f"base_model.model.{name.removesuffix('weight')}lora_{one}.weight") for one in "BA"]
        expected = weight.double()
        if factors[0] is not None and factors[1] is not None:
            expected = expected + 16 / 4 * factors[0].double() @ factors[1].double()
            lost += int((expected.bfloat16().double() - expected).abs().max() > 1e-4)
        torch.testing.assert_close(saved[name].double(), expected, rtol=0, atol=1e-6)
    assert lost == 2 * 7
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "saved", dtype="auto")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items() if name in saved)
    again = make(str(tmp_path / "base"), run_dir, *forward)
    again.load_saved(run_dir / "saved")
    assert_same_weights(again, engine)


def test_a_critic_s_output_layer_is_trained_and_saved_with_its_adapters(tmp_path: Path, run_dir: Path) -> None:
    path = write_critic(tmp_path)
    plain, engine = value_engine(path, run_dir), value_engine(path, run_dir, "critic.model.lora_rank=4")
    batch = value_batch()
    assert torch.equal(engine.values(batch).tokens["value"], plain.values(batch).tokens["value"])
    before = weights(engine)
    for _ in range(2):
        engine.update(batch)
    engine.save_pretrained(run_dir / "saved", None)
    after = weights(engine)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"score.weight", "score.bias", "model.layers.0.mlp.up_proj.weight"} < changed
    assert not any("norm" in name or "embed" in name or name.endswith("q_proj.bias") for name in changed)
    mask_T = batch.tokens["loss_mask"].bool()
    found, (_, expected) = engine.values(batch).tokens["value"], defined_values(str(run_dir / "saved"), batch)
    torch.testing.assert_close(found[mask_T].double(), expected[mask_T], rtol=1e-4, atol=1e-4)
    base = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    adapted = PeftModel.from_pretrained(base, run_dir / "saved" / "adapter")
    for name, parameter in adapted.merge_and_unload().named_parameters():
        torch.testing.assert_close(parameter, after[name], rtol=1e-5, atol=1e-6)
    again = value_engine(path, run_dir, "critic.model.lora_rank=4")
    again.load_saved(run_dir / "saved")
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(again).items())


def test_saved_adapters_are_put_back(model_path: str, run_dir: Path) -> None:
    engine = make(model_path, run_dir)
    train(engine, range(2))
    engine.save_pretrained(run_dir / "saved", None)
    again = make(model_path, run_dir)
    train(again, range(1))
    again.load_saved(run_dir / "saved")
    assert_same_weights(again, engine)
    assert not again.learner.optimizer.state
    make_engine(model_path, run_dir).save_pretrained(run_dir / "plain", None)
    with pytest.raises(CheckpointError, match="no adapter/adapter_model.safetensors: it was saved by a run without"):
        again.load_saved(run_dir / "plain")


def test_going_on_gives_the_same_bits_without_the_base_in_the_state(
    model_path: str, run_dir: Path, tmp_path: Path
) -> None:
    straight = make(model_path, run_dir)
    train(straight, range(3))
    folder = save_state(straight, tmp_path / "state")
    digests = straight.resumable.saved()
    assert {name: digest(folder / name) for name in digests} == digests
    assert digests.keys() == {path.name for path in folder.iterdir()} and "base.json" in digests
    names = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    assert len([name for name in names if name.startswith("policy.")]) == 2 * 2 * 7
    assert all(".lora_" in name for name in names if name.startswith(("policy.", "optimizer.", "anchor.")))
    broken = make(model_path, run_dir)
    broken.load_state(folder)
    assert train(broken, range(3, 6)) == train(straight, range(3, 6))
    assert_same_weights(broken, straight)


def test_a_state_belongs_to_its_base(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    engine = make(model_path, run_dir)
    train(engine, range(1))
    folder = save_state(engine, tmp_path / "state")
    moved = make(str(shutil.copytree(model_path, tmp_path / "moved")), run_dir)
    moved.load_state(folder)
    assert_same_weights(moved, engine)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(other_model_path, run_dir), f"trained on the weights of {model_path}.*has different weights"),
        (lambda: make_engine(model_path, run_dir), "has adapters .base.json.: set lora_rank as that run did"),
        (lambda: make(model_path, run_dir, f"{MODEL}.lora_rank=5"), r"lora_A has the shape \[4, \d+\], not \[5, \d+\]"),
        (lambda: make(model_path, run_dir, f"{MODEL}.trained_layers=1"), "layers.0.* an adapter that this run has not"),
    ]
    for other, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            other().load_state(folder)
    plain = save_state(make_engine(model_path, run_dir), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no base.json, because that run trained all weights"):
        engine.load_state(plain)
