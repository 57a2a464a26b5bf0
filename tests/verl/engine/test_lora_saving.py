"""Adapters on disk: peft's format read by peft itself, states without the base, and what does not fit together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import make_batch, make_engine
from engine_state import assert_same_weights, full_state, save_state
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from value_cases import defined_values, value_batch, value_engine, weights, write_critic

from verl.engine.policy_engine import PolicyEngine
from verl.errors import CheckpointError
from verl.storage import digest

RANK = "actor_rollout_ref.model.lora_rank=4"


def make(model_path: str, run_dir: Path, *overrides: str) -> PolicyEngine:
    return make_engine(model_path, run_dir, RANK, *overrides, with_anchor=True)


def train(engine: PolicyEngine, steps: range) -> list[dict[str, float]]:
    return [engine.update(make_batch(seed=step)) for step in steps]


def test_peft_reads_what_is_saved(model_path: str, run_dir: Path) -> None:
    engine = make(model_path, run_dir, "actor_rollout_ref.model.lora_alpha=6")
    train(engine, range(2))
    engine.save_pretrained(run_dir / "saved", None)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run_dir / "saved" / "adapter")
    ids = make_batch().tokens["ids"][None, :20]
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "saved", dtype=torch.float32)
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    state = full_state(engine)
    for name, parameter in adapted.merge_and_unload().named_parameters():
        torch.testing.assert_close(parameter, state[name], rtol=1e-5, atol=1e-6)
    assert adapted.peft_config["default"].base_model_name_or_path == model_path


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
        (lambda: make_engine(model_path, run_dir, "actor_rollout_ref.model.lora_rank=5"), "cannot be loaded"),
    ]
    for other, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            other().load_state(folder)
    plain = save_state(make_engine(model_path, run_dir), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no base.json, because that run trained all weights"):
        engine.load_state(plain)
