"""An engine that reads no weights: it samples only once a sync has brought all of them, and then as any other."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_config import run_config
from transformers import AutoModelForCausalLM
from weight_source import stream_of

from verl.agent.environment import Generation, Sampling
from verl.errors import WeightSyncError
from verl.rollout.worker import settings_of

ROLLOUT, WEIGHTS = "actor_rollout_ref.rollout", "model.safetensors"
PROMPTS = [[5, 6, 7], [40, 41, 42, 43], list(range(3, 60))]
HOW = [Sampling(max_tokens=20, seed=seed) for seed in range(3)]
COVERED = ("model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "model.layers.2.mlp.down_proj.weight")


@pytest.fixture(scope="module")
def named(tiny_model_dir: Path) -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).named_parameters())


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The model without its weights."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=shutil.ignore_patterns(WEIGHTS)))


@pytest.fixture
def dummy(session: Any, model_dir: Path) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as temporary:
        started = type(session)(model_dir, Path(temporary), load_format="dummy")
        yield started
        started.close()


def one_by_one(engine: Any) -> list[Generation]:
    """A turn for each prompt: what else an engine samples at the time changes how it rounds."""
    return [
        generation for prompt, how in zip(PROMPTS, HOW, strict=True) for generation in engine.sample([prompt], [how])
    ]


def test_after_the_first_sync_it_samples_as_an_engine_that_has_read_the_files(
    dummy: Any, session: Any, named: Any, weight_dir: Path
) -> None:
    """The folder has no weights to read; before the sync it refuses to sample."""
    with pytest.raises(WeightSyncError, match="no complete weights"):
        dummy.sample(PROMPTS, HOW)
    dummy.load(stream_of(named, 3, weight_dir, bucket_mib=0.05))
    found, expected = one_by_one(dummy), one_by_one(session)
    assert [(one.ids, one.log_probs) for one in found] == [(one.ids, one.log_probs) for one in expected]
    assert {one.weight_version for one in found} == {3}
    # Only the first version has to bring everything; the checksums are those of every version.
    dummy.load(stream_of(named, 4, weight_dir))
    assert [one.ids for one in one_by_one(dummy)] == [one.ids for one in expected]


@pytest.mark.parametrize("bucket_mib", [0.05, 512])
def test_what_the_first_sync_does_not_bring_is_named(
    dummy: Any, named: Any, weight_dir: Path, bucket_mib: float
) -> None:
    """A norm, a part of what vLLM fuses, and a layer that the CPU kernels keep in a form of their own."""
    lacking = [(name, value) for name, value in named if name not in COVERED]
    assert len(lacking) == len(named) - len(COVERED)
    with pytest.raises(WeightSyncError, match=r"no values for model.layers.1.self_attn.qkv_proj.bias.*and 2 more") as e:
        dummy.load(stream_of(lacking, 1, weight_dir, bucket_mib=bucket_mib))
    assert f"{ROLLOUT}.load_format=auto" in str(e.value)
    with pytest.raises(WeightSyncError):
        dummy.sample(PROMPTS, HOW)


def test_adapters_are_merged_into_the_files_at_the_sync(
    dummy: Any, session: Any, model_dir: Path, tiny_model_dir: Path, weight_dir: Path
) -> None:
    """The base is read then, and only then."""
    shutil.copy(tiny_model_dir / WEIGHTS, model_dir)
    name, draw = "model.layers.0.mlp.up_proj.weight", torch.Generator().manual_seed(0)
    sizes = {f"{name}.lora_A": (2, 96), f"{name}.lora_B": (256, 2)}
    adapters = {
        key: torch.zeros(size) if key.endswith("A") else torch.randn(size, generator=draw)
        for key, size in sizes.items()
    }
    dummy.load(stream_of(adapters.items(), 1, weight_dir))
    found, expected = one_by_one(dummy), one_by_one(session)
    assert [(one.ids, one.log_probs) for one in found] == [(one.ids, one.log_probs) for one in expected]


def settings(model_dir: Path, *overrides: str, gets_weights: bool = True) -> str:
    config = run_config([f"actor_rollout_ref.model.path={model_dir}", *overrides])
    return settings_of(config, 64, "cpu", gets_weights).load_format


def test_which_engines_read_no_weights(model_dir: Path) -> None:
    """Those of a run, unless the config says otherwise, or the model has scales that no trainer sends."""
    assert settings(model_dir) == "dummy"
    assert settings(model_dir, gets_weights=False) == "auto", "inference, the chat endpoint, evaluation"
    assert settings(model_dir, f"{ROLLOUT}.load_format=auto") == "auto"
    assert settings(model_dir, f"{ROLLOUT}.load_format=safetensors") == "safetensors"
    config = json.loads((model_dir / "config.json").read_text())
    scaled = {"quantization_config": {"quant_method": "fp8"}}
    (model_dir / "config.json").write_text(json.dumps(config | scaled))
    assert settings(model_dir) == "auto"
