"""What a checkpoint takes on the disk, against what is said of it before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import CPU, VOCABULARY, make_batch, make_config
from engine_state import save_state
from transformers import Qwen2Config, Qwen2ForCausalLM
from value_cases import value_batch

from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.trainer.preflight.disk import checkpoint_bytes
from verl.trainer.preflight.models import models_of


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """Of 0.9 million parameters, so that the headers of tensors do not count."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=128, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("tau", [0.9, 1.0], ids=["anchor_moves", "anchor_stays"])
def test_a_checkpoint_is_as_large_as_was_said(tau: float, model_dir: str, run_dir: Path) -> None:
    settings = (f"critic.model.path={model_dir}", f"algorithm.ref_policy_ema_tau={tau}")
    config = make_config(model_dir, run_dir, *settings)
    policy, critic = PolicyEngine(config, CPU, 10, with_anchor=True), ValueEngine(config, CPU, 10)
    policy.update(make_batch())
    critic.update(value_batch())
    for engine, role in ((policy, "actor"), (critic, "critic")):
        engine.save_pretrained(run_dir / role, None)
        save_state(engine, run_dir / f"{role}_state")
    if tau < 1:
        policy.save_pretrained(run_dir / "ref", None, of="anchor")
    expected, count = checkpoint_bytes(config, models_of(config), steps=1)
    assert count == 1
    assert size_of(run_dir) == pytest.approx(expected, rel=0.02)
