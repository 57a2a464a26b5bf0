"""A model is the same whether it is loaded by slices or whole, and the log says why it had to be the latter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CPU, VOCABULARY, write_model
from engine_state import whole
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verl.config.sections.critic import CriticModelConfig
from verl.config.sections.model import FsdpConfig, ModelConfig
from verl.engine.files.loading import load_sharded, load_sharded_critic
from verl.engine.hf_model import last_layers
from verl.engine.model import CausalLm, layout_of, why_other_logits
from verl.errors import ConfigError

WHOLE = "every worker loads the whole model"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def llama(folder: Path) -> None:
    """Bfloat16 in several files, the head on its own, rotary frequencies that are not the default."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=False))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()


def moe(folder: Path) -> None:
    """The files hold one expert each, the model all experts of a layer in one weight."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4))
    model.save_pretrained(folder)


def decoder_alone(folder: Path) -> None:
    """The names lack the prefix of the decoder, and the head is the embedding."""
    write_model(folder)
    Qwen2Model(Qwen2ForCausalLM.from_pretrained(folder).config).save_pretrained(folder)


def old_format(folder: Path) -> None:
    write_model(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_head(change: Callable[[torch.Tensor], torch.Tensor], keep: bool) -> Callable[[Path], None]:
    """A tied model whose files hold a head too; without `keep` no embedding."""

    def write(folder: Path) -> None:
        write_model(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())
        if not keep:
            del tensors["model.embed_tokens.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def without(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder, tied=False)
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def generating(folder: Path) -> None:
    """With settings for generation and a weight that no layer wants."""
    write_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    tensors = load_file(folder / "model.safetensors") | {"model.other.weight": torch.ones(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SLICED: dict[str, Callable[[Path], object]] = {
    "tied": write_model,
    "untied": lambda folder: write_model(folder, tied=False),
    "llama": llama,
    "gpt2": lambda folder: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)
    ).save_pretrained(folder),
    "decoder_alone": decoder_alone,
    "same_head_twice": with_head(lambda weight: weight, keep=True),
    "head_for_embedding": with_head(lambda weight: weight, keep=False),
    "generating": generating,
}
LOADED_WHOLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "layout": (moe, "changes the layout of model.layers.0.mlp.experts.0.down_proj.weight"),
    "bin": (old_format, "no safetensors files"),
    "differing_heads": (with_head(lambda weight: weight + 1, keep=True), "should be equal, but differ"),
}


def loaded(path: Path) -> PreTrainedModel:
    fsdp = FsdpConfig()
    model = load_sharded(str(path), ModelConfig(), fsdp, fsdp.mixed_precision, CPU, None, trained=True)
    return model.model


def assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Weights and buffers bit for bit, sharing, configs, and whether it trains."""
    tensors, others = (
        dict(m.named_parameters(remove_duplicate=False)) | dict(m.named_buffers()) for m in (model, expected)
    )
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(whole(tensor), others[name]), name
    assert len(list(model.parameters())) == len(list(expected.parameters()))
    assert model.training == expected.training
    configs = [dict(m.config.to_dict(), _name_or_path="") for m in (model, expected)]
    assert configs[0] == configs[1]
    if model.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("case", SLICED)
def test_loaded_by_slices(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SLICED[case](tmp_path)
    state = torch.get_rng_state()
    model = loaded(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model, CausalLm(str(tmp_path), CPU).whole())
    assert WHOLE not in caplog.text


@pytest.mark.parametrize("case", LOADED_WHOLE)
def test_loaded_whole_and_said_so(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write, reason = LOADED_WHOLE[case]
    write(tmp_path)
    assert_same(loaded(tmp_path), CausalLm(str(tmp_path), CPU).whole())
    assert WHOLE in caplog.text and reason in caplog.text


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_what_is_not_in_the_files_is_left_to_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without(name)(tmp_path)
    assert whole(loaded(tmp_path).get_parameter(name)).isfinite().all()
    assert WHOLE in caplog.text and f"1 weights are not in the files, the first is {name}" in caplog.text


def critic(path: Path) -> PreTrainedModel:
    return load_sharded_critic(CriticModelConfig(path=str(path)), CPU).model


def test_a_critic_from_a_language_model_has_a_head_of_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path)
    model = critic(tmp_path)
    expected = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32, num_labels=1)
    assert not whole(model.score.weight).any() and not whole(model.score.bias).any()
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(whole(model.model.get_parameter(name)), parameter)
    assert WHOLE not in caplog.text


def test_a_critic_without_a_decoder_is_refused(tmp_path: Path) -> None:
    without("model.norm.weight")(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 weights of its decoder, the first is model.norm.weight"):
        critic(tmp_path)


def test_a_truncated_file_is_a_config_error(tmp_path: Path) -> None:
    write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"cannot load the model: .*model.safetensors"):
        loaded(tmp_path)


@pytest.mark.parametrize("load", [loaded, critic])
def test_weights_of_another_shape_are_a_config_error(load: Callable[[Path], PreTrainedModel], tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"cannot load a .* from '{tmp_path}'"):
        load(tmp_path)


TEXT = SIZES | {"head_dim": 8, "sliding_window": 7}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 8, "num_kv_shared_layers": 0}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
SEES = {"vision_config": VISION | {"image_size": 32, "patch_size": 16}, "mm_tokens_per_image": 4}
AFTER, BEFORE = "changes its logits after its output layer", "changes its last hidden states before its output layer"
OTHER_LOGITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "capped": ("gemma2", TEXT, AFTER),
    "capped by another name": ("recurrent_gemma", SIZES | {"lru_width": 32}, AFTER),
    "capped in a part": (
        "gemma4", {"text_config": TEXT | GEMMA4 | {"final_logit_softcapping": 30.0}, "audio_config": None}, AFTER
    ),
    "scaled": ("cohere", SIZES, AFTER),
    "divided": ("granite", SIZES | {"logits_scaling": 4.0}, AFTER),
    "multiplied": ("falcon_h1", SIZES | MAMBA | {"lm_head_multiplier": 0.25}, AFTER),
    "cut": ("inkling_text", SIZES | {"logits_mup_width_multiplier": 1.0, "unpadded_vocab_size": VOCABULARY - 1}, AFTER),
    "divided before": ("minicpm3", SIZES | {"dim_model_base": 16}, BEFORE),
    "a layer between": ("bert", SIZES | {"is_decoder": True}, "does more than its output layer does after its decoder"),
    "no name of its decoder": ("llama4_text", SIZES, "does not name its decoder"),
}  # fmt: skip
SAME_LOGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "divided by 1": ("granite", SIZES | {"logits_scaling": 1.0}),
    "multiplied by 1": ("falcon_h1", SIZES | MAMBA),
    "passes by a part": ("opt", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "experts": ("mixtral", SIZES | {"num_local_experts": 4, "output_router_logits": True}),
    "sees": ("gemma3", {"text_config": TEXT} | SEES),
    "sees and hears": ("gemma4", {"text_config": TEXT | GEMMA4, "audio_config": None}),
}


def save_config(folder: Path, model_type: str, settings: dict[str, Any]) -> CausalLm:
    AutoConfig.for_model(model_type, **settings).save_pretrained(folder)
    return CausalLm(str(folder), CPU)


@pytest.mark.parametrize("case", OTHER_LOGITS)
def test_a_model_that_changes_its_logits_is_refused(case: str, tmp_path: Path) -> None:
    *saved, reason = OTHER_LOGITS[case]
    hf = save_config(tmp_path, *saved)
    for load in (lambda: loaded(tmp_path), hf.on_meta):
        with pytest.raises(ConfigError, match=reason):
            load()


@pytest.mark.parametrize("case", SAME_LOGITS)
def test_a_model_whose_logits_are_those_of_its_output_layer_is_not(case: str, tmp_path: Path) -> None:
    assert why_other_logits(save_config(tmp_path, *SAME_LOGITS[case]).blank()) is None


def test_a_model_of_several_parts_is_read_as_its_text_part(tmp_path: Path) -> None:
    """Its config has the sizes, the dropout and what keeps rows from being packed in `text_config`."""
    text = TEXT | {"attention_dropout": 0.1, "attn_logit_softcapping": 50.0}
    model = save_config(tmp_path, "gemma3", {"text_config": text} | SEES).blank()
    assert model.config.text_config.attention_dropout == 0
    layout = layout_of([model], remove_padding=True)
    assert not layout.packed and layout.square > 0
    with pytest.raises(ConfigError, match="2 layers"):
        last_layers(model, 3)
    assert all(type(layer).__name__ == "Gemma3DecoderLayer" for layer in last_layers(model, None))
