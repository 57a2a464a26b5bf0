"""Fused layers: when they are used, and that they change no number and no name. Kernels by formula stand for Liger's,
which run on CUDA; where Triton and Liger are installed, its interpreter runs Liger's own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import engine_workers
import fused_cases
import pytest
import torch
from engine_cases import make_engine
from fused_cases import (
    CHECKPOINTING,
    INTERPRETED,
    LORA,
    by_formula,
    errors_of_engine,
    largest_error,
    log_probs_and_gradient,
    replaced,
)
from fused_cases import tiny_model as model_of
from test_sft_engine import sft_config
from transformers import Gemma2Config, Gemma2ForCausalLM
from value_cases import gradients, value_batch, value_engine, write_critic

from verl.engine.device.runtime import cpu_stands_for
from verl.engine.fused_layers import MODEL_TYPES, fuse, use_fused_layers
from verl.engine.sft_engine import SftEngine
from verl.errors import ConfigError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HERE = Path(__file__).parent


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package liger_kernel with the kernels by formula."""
    package = tmp_path / "site" / "liger_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops.py").write_text("from fused_cases import *\n")
    monkeypatch.syspath_prepend(str(package.parent))
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "liger_kernel"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.modules.update(own)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find(name))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_known_type_computes_the_same(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain, fused = model_of(kind), model_of(kind)
    names = list(fused.state_dict())
    assert use_fused_layers(fused, None, CUDA)
    assert f"{type(fused).__name__} are Liger's fused kernels" in caplog.text
    assert replaced(fused) == 2 * (4 if kind != "qwen3" else 6) + 1, (
        "norms, MLP and attention of a layer; the last norm"
    )
    assert largest_error(log_probs_and_gradient(fused), log_probs_and_gradient(plain)) < 3e-5
    assert list(fused.state_dict()) == names and not replaced(plain), "another model of the process stays as it is"


@pytest.mark.usefixtures("installed")
def test_an_activation_that_is_not_silu_is_kept() -> None:
    plain, fused = model_of("llama"), model_of("llama")
    for model in (plain, fused):
        model.config.hidden_act = "gelu"
        for layer in model.base_model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
    assert use_fused_layers(fused, True, CUDA)
    assert replaced(fused) == 2 * 3 + 1
    assert largest_error(log_probs_and_gradient(fused), log_probs_and_gradient(plain)) < 3e-5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("wanted", [None, True])
def test_a_type_without_fused_layers(wanted: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=61, num_key_value_heads=2, head_dim=8, **sizes))
    assert not use_fused_layers(model, wanted, CUDA)
    assert "there are no fused layers for model type gemma2" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING if wanted else logging.INFO]
    assert not replaced(model)


@pytest.mark.usefixtures("installed")
def test_code_that_comes_with_a_model_is_not_touched() -> None:
    """Its classes may be called and compute as they like, whatever type it says it is."""
    model = model_of("qwen2")
    model.model.__class__ = type("Qwen2Model", (type(model.model),), {"__module__": "transformers_modules.own"})
    assert not use_fused_layers(model, None, CUDA)


@pytest.mark.usefixtures("installed")
def test_false_and_a_cpu_leave_layers_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = model_of("qwen2")
    assert not use_fused_layers(model, False, CUDA)
    assert not use_fused_layers(model, None, CPU)
    with cpu_stands_for("cuda"):
        assert not use_fused_layers(model, True, CPU)
    assert not replaced(model) and not caplog.records


@pytest.mark.usefixtures("not_installed")
def test_a_missing_package_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = model_of("qwen2")
    assert not use_fused_layers(model, None, CUDA)
    assert "liger-kernel is not there; to save time, install it: .venv/bin/pip install" in caplog.text
    with pytest.raises(ConfigError, match="the package liger-kernel is not there; install it: .venv"):
        use_fused_layers(model, True, CUDA)


def test_every_engine_comes_through_the_same_door(model_path: str, tmp_path: Path) -> None:
    no_cuda = "use_liger=true, but the model is on cpu: Liger's kernels run on CUDA; set use_liger=null"
    wanted = "actor_rollout_ref.model.use_liger=true"
    with pytest.raises(ConfigError, match=no_cuda):
        make_engine(model_path, tmp_path, wanted)
    with pytest.raises(ConfigError, match=no_cuda):
        value_engine(write_critic(tmp_path / "critic"), tmp_path, wanted)  # the critic's follows the actor's
    with pytest.raises(ConfigError, match=no_cuda):
        SftEngine(sft_config(model_path, tmp_path, "model.use_liger=true"), CPU)
    value_engine(str(tmp_path / "critic"), tmp_path, wanted, "critic.model.use_liger=false")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        CHECKPOINTING,
        LORA,
        (*LORA, *CHECKPOINTING, "actor_rollout_ref.model.target_modules=[q_proj,up_proj]"),
        ("actor_rollout_ref.model.use_remove_padding=false",),
    ],
)
def test_an_engine_computes_the_same(
    overrides: tuple[str, ...], model_path: str, other_model_path: str, run_dir: Path
) -> None:
    errors = errors_of_engine(by_formula(), run_dir, model_path, other_model_path, overrides)
    assert len(errors) == 3 and max(errors) < 1e-3, errors  # AdamW's first steps amplify rounding
    assert max(errors[:2]) < 1e-5, errors


def test_a_critic_computes_the_same(tmp_path: Path) -> None:
    path, batch = write_critic(tmp_path / "critic"), value_batch()
    plain, fused = (value_engine(path, tmp_path) for _ in range(2))
    fuse(fused.model.model, by_formula())
    values = [engine.values(batch).tokens["value"] for engine in (fused, plain)]
    grads = [torch.cat([g.flatten() for g in gradients(engine, batch).values()]) for engine in (fused, plain)]
    assert largest_error([values[0], grads[0]], [values[1], grads[1]]) < 1e-5


@pytest.mark.parametrize("sharding", [(), engine_workers.shared_by(2)])
def test_two_ranks_compute_the_same(
    sharding: tuple[str, ...], model_path: str, other_model_path: str, tmp_path: Path
) -> None:
    """Each with its own rows, and with a slice of each row."""
    task = partial(fused_cases.on_two_ranks, overrides=(*sharding, *CHECKPOINTING))
    errors = engine_workers.run(tmp_path, model_path, other_model_path, 2, task)[0]["errors"]
    assert len(errors) == 3 and max(errors[:2]) < 1e-5 and errors[2] < 1e-3, errors


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None,
    reason="liger-kernel and triton are not installed: Liger's kernels are checked by scripts/gpu/engine_check.py",
)
def test_ligers_own_kernels_in_tritons_interpreter(model_path: str, tmp_path: Path) -> None:
    paths = [*map(str, (HERE, HERE.parents[1] / "helpers", HERE.parents[2])), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, HERE / "fused_cases.py", model_path, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stderr
    errors = {name: float(error) for name, error in map(str.split, done.stdout.splitlines())}
    assert set(errors) == {*INTERPRETED, "engine", "adapters"}
    assert all(error < (3e-5 if name in INTERPRETED else 1e-3) for name, error in errors.items()), errors
