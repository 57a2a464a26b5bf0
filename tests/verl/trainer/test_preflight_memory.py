"""What is known of models and engines before anything is loaded, against public sizes and sums done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config import run_config
from transformers import Qwen2Config

from verl.config import Config
from verl.engine.files.loading import CPU, model_shape
from verl.engine.model import CausalLm
from verl.engine.value_model import TokenClassifier
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import kv_cache_tokens, room_for_sequences
from verl.planning.dry_run.place import GIB, USUAL, Place, parse_gpus
from verl.trainer.preflight import main
from verl.trainer.start_checks.command_line import parse
from verl.trainer.start_checks.models import models_of

SHAPES = Path(__file__).with_name("shapes")
ACTOR = "actor_rollout_ref.actor"
NODE = Place(8, 80 * GIB, USUAL)


def run(model: Path | str, *overrides: str) -> Config:
    given = [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=5",
        f"{ACTOR}.use_dynamic_bsz=true",
    ]
    return run_config([*given, *overrides])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-3B", 3.09),
        ("Qwen2.5-7B", 7.62),
        ("Qwen2.5-14B", 14.77),
        ("Qwen2.5-32B", 32.76),
        ("Qwen2.5-72B", 72.71),
        ("Llama-3.2-3B", 3.21),
    ],
)
def test_parameters_without_weights(name: str, billions: float) -> None:
    assert model_shape(CausalLm(str(SHAPES / name), CPU)).num_params / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_cache_by_hand() -> None:
    config = run(SHAPES / "Qwen2.5-7B")  # two GPUs an engine, half of each
    policy = models_of(config).policy
    per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads of 128, bfloat16
    warm_up = (
        2 * 8192 * (18944 + 4 * 3584)
    )  # an iteration of so many tokens: two of the MLP's halves, four of the width
    room = 2 * (40 * GIB - policy.num_params - warm_up)
    assert kv_cache_tokens(config, policy, NODE) == room // per_token
    on_cpu = Place(1, 16 * GIB)
    assert kv_cache_tokens(config, policy, on_cpu) == GIB // per_token


def test_an_engine_without_room_for_one_sequence() -> None:
    config = run(SHAPES / "Qwen2.5-32B", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3")
    policy = models_of(config).policy
    assert kv_cache_tokens(config, policy, NODE) < 0  # 61 GiB of weights on two GPUs, of 24 GiB each
    room, words = room_for_sequences(config, policy, NODE)
    assert not room and "tensor_model_parallel_size=4" in words
    small = run(SHAPES / "Qwen2.5-7B")
    assert room_for_sequences(small, models_of(small).policy, NODE)[0]


def test_a_critic_is_a_value_model(tiny_model_dir: Path) -> None:
    # The head of 152064 tokens gives way to one output, each of width 3584, with a bias.
    untied = model_shape(TokenClassifier(str(SHAPES / "Qwen2.5-7B"), CPU))
    whole = model_shape(CausalLm(str(SHAPES / "Qwen2.5-7B"), CPU))
    assert untied.num_params == whole.num_params - 152064 * 3584 + 3585
    loaded = TokenClassifier(str(tiny_model_dir), CPU).whole()
    assert model_shape(TokenClassifier(str(tiny_model_dir), CPU)).num_params == sum(
        p.numel() for p in loaded.parameters()
    )


def test_a_model_that_cannot_be_a_critic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="cannot be a critic"):
        model_shape(TokenClassifier(str(tmp_path), CPU))


def test_a_model_of_a_library_that_the_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_models.py").write_text(
        """
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
class TheirConfig(Qwen2Config):
    model_type = "theirs"
class TheirModel(Qwen2ForCausalLM):
    config_class = TheirConfig
AutoConfig.register("theirs", TheirConfig)
AutoModelForCausalLM.register(TheirConfig, TheirModel)
"""
    )
    (tmp_path / "config.json").write_text((SHAPES / "Qwen2.5-3B/config.json").read_text().replace("qwen2", "theirs"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="theirs"):
        models_of(run(tmp_path))
    config = run(tmp_path, "actor_rollout_ref.model.external_lib=their_models")
    assert models_of(config).policy == model_shape(CausalLm(str(SHAPES / "Qwen2.5-3B"), CPU))


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_shape(CausalLm(str(tmp_path), CPU))


def test_other_devices() -> None:
    """`--devices` and `--device_memory_gib` say what `--gpus` says."""
    said = parse(["--gpus", "8x80"])
    assert parse(["--devices", "8", "--device_memory_gib", "79.1"]) == said
    assert said.place == parse_gpus("8x80") and said.elsewhere and not parse([]).elsewhere


@pytest.mark.parametrize(("memory", "status", "level"), [("79.1", 0, "ok "), ("1", 1, "FAIL")])
def test_the_command(
    memory: str,
    status: int,
    level: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--estimate_only` is the dry run."""
    monkeypatch.setattr("verl.planning.dry_run.run.three_settings", lambda *_: [])  # takes several dry runs more
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 512}
    Qwen2Config(**sizes, num_attention_heads=3, num_key_value_heads=1).save_pretrained(tmp_path)
    given = [
        "--estimate_only", "--devices", "8", "--device_memory_gib", memory,
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5",
        f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=gone", "data.val_files=gone",
        "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=40",
        "actor_rollout_ref.actor.ppo_micro_batch_size=16", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ]  # fmt: skip
    assert main(given) == status
    out = capsys.readouterr().out.splitlines()
    assert next(line for line in out if "memory: " in line).startswith(level)
    table = next(number for number, line in enumerate(out) if line.startswith("phase"))
    assert [line.split()[0] for line in out[table + 1 : table + 5]] == list(Phase)
    assert not any("gone" in line for line in out)
    assert any(line.startswith("KV cache: an engine has room") for line in out)
