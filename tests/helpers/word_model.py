"""A tiny random causal language model whose tokens are words."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "who", "is", "a", "b", "c", "d", "search", "answer", "docs", "."]


def make_word_model(folder: Path) -> Path:
    """Save tokenizer and model, always the same ones, to `folder`."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    # (loading keeps this architecture's tokenizer as it is; a Qwen2 folder would get Qwen2's own splitting of text)
    config = Olmo2Config(vocab_size=len(WORDS), num_key_value_heads=2, max_position_embeddings=64, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Olmo2ForCausalLM(config).save_pretrained(folder)
    return folder
