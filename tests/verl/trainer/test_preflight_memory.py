"""What is known of models and engines before anything is loaded, against public sizes and sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_config import run_config
from transformers import AutoConfig, Qwen2Config

from verl.config import Config
from verl.engine.files.loading import CPU, model_shape
from verl.engine.model import CausalLm, TokenClassifier
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import AtOnce, kv_cache_tokens, room_for_sequences, sampled_at_once
from verl.planning.dry_run.memory import Peak
from verl.planning.dry_run.passes import Work
from verl.planning.dry_run.place import GIB, USUAL, Groups, Place, parse_gpus
from verl.planning.dry_run.roles import Pass, Role
from verl.planning.dry_run.run import judged
from verl.trainer.dry_run import parse as parse_dry_run
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


def test_with_longrope_a_sequence_is_as_long_as_its_frequencies_last(tmp_path: Path) -> None:
    """Those of Llama 3, with the same key, do not change with the length."""
    ropes = {
        "longrope": ({"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 16),
        "llama3": ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128),
    }
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    for family, kind in (("phi3", "longrope"), ("llama", "llama3")):
        parameters, window = ropes[kind]
        rope = {"rope_type": kind, "rope_theta": 10_000.0, "original_max_position_embeddings": 16} | parameters
        longest = {"max_position_embeddings": 128, "original_max_position_embeddings": 16, "pad_token_id": None}
        config = AutoConfig.for_model(family, vocab_size=61, **sizes, **longest, rope_parameters=rope)
        config.save_pretrained(tmp_path / family)
        assert model_shape(CausalLm(str(tmp_path / family), CPU)).window == window


def test_a_cache_by_hand() -> None:
    config = run(SHAPES / "Qwen2.5-7B")  # two GPUs an engine, half of each
    policy = models_of(config).policy
    per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads of 128, bfloat16
    iteration = 2 * 8192 * (18944 + 4 * 3584)  # of so many tokens: two of the MLP's halves, four of the width
    logits = 10 * 1024 * 152064 + 2 * 8192 * 3584  # bfloat16 and twice float32 for each sequence; all hidden states
    assert logits > iteration
    room = 2 * (40 * GIB - policy.num_params - logits - 2 * GIB)  # and a process, and CUDA graphs
    assert kv_cache_tokens(config, policy, NODE) == room // per_token
    on_cpu = Place(1, 16 * GIB)
    for dtype, width in (("bfloat16", 2), ("float32", 4)):  # by default it is the CPU's instructions that decide
        config.actor_rollout_ref.rollout.dtype = dtype
        assert kv_cache_tokens(config, policy, on_cpu) == GIB // (per_token // 2 * width)


def test_key_heads_are_kept_twice_where_an_engine_has_more_gpus() -> None:
    """The 3B model has two key heads: of four GPUs each has a whole one, so half of what four times the memory says."""
    tokens = {}
    for ranks in (2, 4):
        config = run(SHAPES / "Qwen2.5-3B", f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}")
        policy = models_of(config).policy
        width = 2 * policy.num_params / ranks
        iteration, logits = 2 * 8192 * (2 * 11008 // ranks + 4 * 2048), 10 * 1024 * 151936 + 2 * 8192 * 2048
        room = 40 * GIB - width - max(iteration, logits) - 2 * GIB
        tokens[ranks] = int(room // (2 * 36 * 128 * 2))  # keys and values of a layer's one head of 128, bfloat16
        assert kv_cache_tokens(config, policy, NODE) == tokens[ranks]
    assert tokens[4] < 1.2 * tokens[2]


def test_how_many_trajectories_are_sampled_at_once() -> None:
    """Windows in the cache, no more than the settings allow or the step has; less than a quarter starves an engine."""
    config = run(SHAPES / "Qwen2.5-7B", "data.train_batch_size=512", "data.max_prompt_length=4096")
    config.actor_rollout_ref.rollout.response_length = 500
    found = sampled_at_once(config, policy := models_of(config).policy, NODE)
    tokens = kv_cache_tokens(config, policy, NODE)
    assert found == AtOnce(tokens, 4096 + 500, 1024, 640)  # 2,560 trajectories, four engines of two GPUs
    assert found.number == tokens // 4596 and not found.starves
    config.actor_rollout_ref.rollout.max_concurrent = 159
    found = sampled_at_once(config, policy, NODE)
    assert found.number == 159 and found.starves and not AtOnce(10**6, 4596, 160, 640).starves
    assert "159 trajectories of that length at once, of the 640" in str(found)


def test_an_engine_that_starves_is_a_warning_with_what_to_set() -> None:
    """Half of 80 GiB leaves 97,000 tokens for 320 trajectories; what the role has at rest, 1.6 GiB, allows 0.9."""
    config = run(SHAPES / "Qwen2.5-7B", "data.train_batch_size=512", "data.max_prompt_length=4096")
    rollout = config.actor_rollout_ref.rollout
    rollout.response_length, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization = 500, 1, 0.3
    role = Role("actor", 7_615_616_512, Peak(0, GIB // 2), [], Groups(8))
    config.trainer.device, config.trainer.n_gpus_per_node = "auto", 8
    found = judged(config, [role], NODE, models_of(config).policy)
    assert found.level == "warn" and found.at_once.starves
    assert "the sampler starves: " in found.verdict
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.9 fits, and has room for" in found.verdict
    rollout.gpu_memory_utilization = 0.9
    assert judged(config, [role], NODE, models_of(config).policy).level == "ok"
    rollout.max_concurrent = 16
    verdict = judged(config, [role], NODE, models_of(config).policy).verdict
    assert verdict.endswith("raise actor_rollout_ref.rollout.max_concurrent=16"), "the cache has room for more"


def test_what_an_engine_that_does_not_sleep_may_have_is_what_every_phase_leaves() -> None:
    """The update takes 40 of 80 GiB and a process 1, which leave 0.43 of a GPU, while sampling leaves 0.9."""
    config = run(SHAPES / "Qwen2.5-7B", "data.train_batch_size=512", "data.max_prompt_length=4096")
    rollout = config.actor_rollout_ref.rollout
    rollout.response_length, rollout.tensor_model_parallel_size, rollout.free_cache_engine = 500, 1, False
    rollout.gpu_memory_utilization = 0.3
    update = Pass(Phase.UPDATE, "update", Peak(0, 40 * GIB), Work(), 1.0, by_tokens=True)
    role = Role("actor", 7_615_616_512, Peak(0, GIB // 2), [update], Groups(8))
    config.trainer.device, config.trainer.n_gpus_per_node = "auto", 8
    policy = models_of(config).policy
    assert "gpu_memory_utilization=0.4 fits" in judged(config, [role], NODE, policy).verdict
    rollout.gpu_memory_utilization = 0.4
    found = judged(config, [role], NODE, policy)
    assert (
        found.verdict.startswith("fits: ") and "set actor_rollout_ref.rollout.free_cache_engine=true" in found.verdict
    )
    rollout.free_cache_engine = True
    assert "gpu_memory_utilization=0.9 fits" in judged(config, [role], NODE, policy).verdict


def test_an_engine_without_room_for_one_sequence() -> None:
    config = run(SHAPES / "Qwen2.5-32B", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3")
    policy = models_of(config).policy
    assert kv_cache_tokens(config, policy, NODE) < 0  # 61 GiB of weights on two GPUs, of 24 GiB each
    room, words = room_for_sequences(config, policy, NODE)
    assert not room and "tensor_model_parallel_size=4" in words
    small = run(SHAPES / "Qwen2.5-7B")
    assert room_for_sequences(small, models_of(small).policy, NODE)[0]


def test_a_model_that_also_sees_has_the_shape_of_its_text_part(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "intermediate_size": 64, "vocab_size": 61, "max_position_embeddings": 128}
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path / "sees")
    AutoConfig.for_model("gemma3_text", **text).save_pretrained(tmp_path / "text")
    sees, alone = (model_shape(CausalLm(str(tmp_path / name), CPU)) for name in ("sees", "text"))
    assert sees.num_params > alone.num_params
    assert replace(sees, num_params=alone.num_params) == alone


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--gpus 8x80 --devices 2", "leave out --devices"),
        ("--gpus 8x80 --device_memory_gib 10", "leave out --devices, --device_memory_gib"),
        ("--devices 0", "--devices 0: "),
        ("--devices -2", "--devices -2: "),
        ("--device_memory_gib nan", "--device_memory_gib nan: "),
        ("--device_memory_gib 1e308", "a finite number"),
        ("--device_memory_gib 0", "above 0"),
    ],
)
def test_devices_that_there_cannot_be(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--estimate_only", *given.split()])


@pytest.mark.parametrize("shows_help", [parse, parse_dry_run])
def test_help_has_the_options_that_the_program_takes(
    shows_help: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        shows_help(["--help"])
    options = capsys.readouterr().out.split("\nKeys:\n")[0]
    assert exit_.value.code == 0 and "--gpus" in options and "8x80" in options and "--cfg" in options
    assert "--multirun" not in options and ("--estimate_only" in options) == (shows_help is parse)


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
