"""The model families that are tried, each with a tiny config; a test compares them with the table of docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 320
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,  # far from uniform predictions
    "dtype": "float32",
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

_GEMMA_4 = {
    "sliding_window": 7,
    "global_head_dim": 64,  # of the last layer
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}
_LONGROPE = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.1 * number for number in range(16)],
        "long_factor": [4.0] * 16,
    },
}


@dataclass(frozen=True)
class Family:
    """`model_type` and `settings` of its config; `packed`: rows of a micro-batch lie in one; `sampled`: vLLM starts
    with it on a CPU; `tokenizer`: the real one (a name of `format_models`) whose chat template is tried, and the class
    of its format.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    sampled: bool = True
    tokenizer: tuple[str, str] | None = None


FAMILIES = {
    "Llama 3.2": Family("llama", tokenizer=("llama3.2", "Llama3")),
    "Qwen2.5": Family("qwen2", tokenizer=("qwen2.5", "ChatML")),
    "Qwen3": Family("qwen3", tokenizer=("qwen3", "Qwen3")),
    "Qwen3-MoE": Family("qwen3_moe", _EXPERTS),
    "Qwen3.5": Family("qwen3_5_text", _DELTA_NET, packed=False, sampled=False),
    "Qwen3-Next": Family(
        "qwen3_next", _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 32}, packed=False, sampled=False
    ),
    "Mistral": Family("mistral", {"sliding_window": 7}),
    "Gemma 3": Family("gemma3_text", {"sliding_window": 7, "query_pre_attn_scalar": 32}),
    "Gemma 4": Family("gemma4_text", _GEMMA_4),
    "Phi-4-mini": Family("phi3", _LONGROPE),
}
DELTA_NETS = [name for name, family in FAMILIES.items() if not family.packed]


def write_family(name: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, saved to `folder`, without a tokenizer."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**_SIZES, **_NO_TOKENS, **family.settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model
