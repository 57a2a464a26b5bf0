"""The small untrained models that tests are made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen2Config


def qwen2_config(
    vocabulary: int, width: int, mlp_width: int, layers: int, heads: tuple[int, int], positions: int, **others: Any
) -> Qwen2Config:
    """`heads`: of queries, and of keys and values. `others`: further keys of config.json."""
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": mlp_width}
    attention = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": positions}
    return Qwen2Config(**sizes, **attention, num_hidden_layers=layers, **others)


def save_untrained(config: Qwen2Config, folder: Path, seed: int = 0) -> Path:
    """A causal model with random weights, in Hugging Face format."""
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
