"""Estimates against what a real update takes, against public sizes of models, and against sums done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measured_update import measure_update
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import Config, load_config
from verl.engine.value_model import TokenClassifier
from verl.errors import ConfigError
from verl.trainer.preflight.__main__ import main
from verl.trainer.preflight.advice import peak, three_settings
from verl.trainer.preflight.memory import actor_update, estimate
from verl.trainer.preflight.models import Models, models_of
from verl.trainer.preflight.passes import activation_bytes
from verl.trainer.preflight.plan import fits
from verl.trainer.preflight.quantities import GIB, Place
from verl.trainer.preflight.sampler import kv_bytes_per_token, kv_cache_tokens
from verl.trainer.preflight.shape import ModelShape, model_shape, value_shape

SHAPES = Path(__file__).with_name("shapes")
VOCABULARY = 1024
ROW = 256
ACTOR = "actor_rollout_ref.actor"
NODE = Place(workers=8, device_bytes=80 * GIB, on_gpu=True)


def run(model: Path | str, *overrides: str) -> Config:
    given = [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=5",
        f"{ACTOR}.use_dynamic_bsz=true",
    ]
    return load_config("ppo_trainer", [*given, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "mlp", "layers", "tokens", "checkpointing"),
    [(128, 384, 3, 8192, False), (256, 768, 4, 3072, False), (192, 640, 4, 6144, True)],
)
def test_the_estimate_is_within_15_percent_of_an_update(
    width: int, mlp: int, layers: int, tokens: int, checkpointing: bool, tmp_path: Path
) -> None:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    overrides = [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=2",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"{ACTOR}.num_threads=1",
    ]
    measured = measure_update(overrides, [ROW] * (2 * tokens // ROW), VOCABULARY, tmp_path)
    run_config = load_config("ppo_trainer", overrides)
    estimated = actor_update(run_config, models_of(run_config), Place(1, 16 * GIB, on_gpu=False))
    print(f"estimated {estimated / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-3B", 3.09),
        ("Qwen2.5-7B", 7.62),
        ("Qwen2.5-14B", 14.77),
        ("Qwen2.5-32B", 32.76),
        ("Llama-3.2-3B", 3.21),
    ],
)
def test_parameters_without_weights(name: str, billions: float) -> None:
    assert model_shape(str(SHAPES / name)).num_params / 1e9 == pytest.approx(billions, abs=0.005)


def test_activations_by_hand() -> None:
    shape = ModelShape(1000, 100, 2, hidden=4, mlp=8, query_width=4, key_width=2, vocabulary=10, window=None)
    # A layer keeps 6*4 + 2*4 + 2*2 + 4*8 = 68 values; its backward pass and the last norm take 3*4 + 2*8 = 28.
    assert activation_bytes(shape, False, 10, 4) == 4 * 10 * (2 * 68 + 28)
    assert activation_bytes(shape, True, 10, 4) == 4 * 10 * (68 + 3 * 4 + 28)
    # bfloat16: 8*4 + 8 + 4 + 32 = 76; 4*4 + 16 = 32.
    assert activation_bytes(shape, False, 10, 2) == 2 * 10 * (2 * 76 + 32)


def test_shards_and_cache_by_hand() -> None:
    config = run(SHAPES / "Qwen2.5-7B", f"{ACTOR}.use_kl_loss=true")
    models = models_of(config)
    parameters = models.policy.num_params
    update = next(phase for phase in estimate(config, models, NODE) if phase.name == "update").parts
    assert update["policy weights"] == 4 * parameters / 8
    assert update["policy optimizer"] == 8 * parameters / 8
    assert update["gradients"] == update["anchor weights"] == 4 * parameters / 8
    assert kv_bytes_per_token(config, models.policy) == 2 * 28 * 512 * 2  # two, layers, 4 heads of 128, bfloat16
    away = [f"{ACTOR}.fsdp_config.{part}_offload=true" for part in ("param", "optimizer")]
    phases = estimate(run(SHAPES / "Qwen2.5-7B", f"{ACTOR}.use_kl_loss=true", *away), models, NODE)
    shards = {
        phase.name: phase.parts.keys() & {"policy weights", "policy optimizer", "anchor weights"} for phase in phases
    }
    assert shards["rollout"] == shards["weight sync"] == {"anchor weights"}
    assert shards["log-probs"] == {"policy weights", "anchor weights"}
    assert shards["update"] == {"policy weights", "policy optimizer", "anchor weights"}


def test_what_does_not_fit_is_told_with_the_settings_that_gain_most() -> None:
    config = run(SHAPES / "Qwen2.5-7B")
    models = models_of(config)
    gains = three_settings(config, models, NODE)
    assert [gain for _, gain in gains] == sorted((gain for _, gain in gains), reverse=True)
    assert gains[0][0] == "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    changed = run(SHAPES / "Qwen2.5-7B", gains[0][0])
    before, after = (peak(estimate(c, models, NODE)).total for c in (config, changed))
    assert before > 80 * GIB > after
    assert [finding.level for finding in fits(config, models, NODE)] == ["FAIL", "ok"]
    assert [finding.level for finding in fits(changed, models, NODE)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("share", "level", "words"),
    [
        (1.001, "FAIL", "memory does not fit"),
        (0.999, "warn", "memory may not fit"),
        (0.951, "warn", "memory may not fit"),
        (0.949, "ok", "memory fits"),
    ],
)
def test_a_device_that_is_nearly_full_is_warned_of(share: float, level: str, words: str) -> None:
    config = run(SHAPES / "Qwen2.5-7B", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2")
    models = models_of(config)
    needed = peak(estimate(config, models, NODE)).total  # of the update, which the device's size does not change
    place = Place(NODE.workers, int(needed / share), on_gpu=True)
    assert peak(estimate(config, models, place)).total == needed
    memory = next(iter(fits(config, models, place)))
    assert (memory.level, memory.what) == (level, words)
    assert ("-" in memory.todo) == (level != "ok"), "what to change, and by how much"
    assert ("5% left" in memory.found) == (level == "warn")


def test_a_sampler_without_room_for_one_sequence() -> None:
    config = run(SHAPES / "Qwen2.5-32B", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3")
    models = models_of(config)
    assert kv_cache_tokens(config, models.policy, NODE) < 0  # 61 GiB of weights on two GPUs, of 24 GiB each
    assert list(fits(config, models, NODE))[1].level == "FAIL"


def test_a_critic_and_a_cache_that_stays_are_counted() -> None:
    path = SHAPES / "Qwen2.5-3B"
    config = run(
        path, "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n_agent=1", f"critic.model.path={path}"
    )
    phases = {phase.name: phase for phase in estimate(config, models_of(config), NODE)}
    # The head is tied to the embedding; a critic has one output of 2048 weights and a bias besides.
    critic_params = models_of(config).policy.num_params + 2049
    assert phases["update"].parts["critic weights"] == 4 * critic_params / 8
    assert phases["update"].parts["critic optimizer"] == 8 * critic_params / 8
    assert "activations" in phases["critic update"].parts
    stays = run(path, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert estimate(stays, Models(models_of(stays).policy), NODE)[-1].parts["sampler"] == 40 * GIB


def test_a_critic_is_a_value_model(tiny_model_dir: Path) -> None:
    # The head of 152064 tokens gives way to one output, each of width 3584, with a bias.
    untied = value_shape(str(SHAPES / "Qwen2.5-7B"))
    assert untied.num_params == model_shape(str(SHAPES / "Qwen2.5-7B")).num_params - 152064 * 3584 + 3585
    loaded = TokenClassifier(str(tiny_model_dir), torch.device("cpu")).whole()
    assert value_shape(str(tiny_model_dir)).num_params == sum(p.numel() for p in loaded.parameters())


def test_a_model_that_cannot_be_a_critic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="cannot be a critic"):
        value_shape(str(tmp_path))


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
    assert models_of(config).policy == model_shape(str(SHAPES / "Qwen2.5-3B"))


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(("gib", "status", "word"), [(40, 1, "memory does not fit"), (80, 0, "memory fits")])
def test_the_command(gib: int, status: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--estimate_only", "--devices", "8", "--device_memory_gib", str(gib), "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=5", f"actor_rollout_ref.model.path={SHAPES / 'Llama-3.2-3B'}",
    ]  # fmt: skip
    assert main(given) == status
    assert word in capsys.readouterr().out
