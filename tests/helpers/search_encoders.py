"""Small untrained encoders in Hugging Face format, for the tests of dense search."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from search_r1.search import index_builder
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions

_TEXT = "query passage : river morn tarsia city country volcano singer paints capital anna velt lune is a in the of"
WORDS = _TEXT.split()
MEAN_POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def ids(words: str) -> list[int]:
    """Token ids of known words, without special tokens."""
    return [WORDS.index(word) + 4 for word in words.split()]


def encoder(folder: Path, family: str = "e5", **options: object) -> Encoder:
    return Encoder(EncoderOptions(family, str(folder), **options))  # type: ignore[arg-type]


def build_dense(model: Path, corpus: Path, folder: Path, *more: str, method: str = "e5") -> int:
    """The exit code of the index builder."""
    arguments = ["--retrieval_method", method, "--model_path", str(model), "--corpus_path", str(corpus)]
    return index_builder.main([*arguments, "--save_dir", str(folder), "--num_threads", "1", *more])


def save_bert(folder: Path, seed: int = 0, **more: int) -> Path:
    """2 layers, width 32, dim 32, 24 positions, and a word tokenizer; `more` of its config."""
    _save_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(BertConfig(**_bert_size() | more)).save_pretrained(folder)
    return folder


def save_dpr(folder: Path, kind: type[DPRContextEncoder] | type[DPRQuestionEncoder], seed: int = 0) -> Path:
    _save_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind(DPRConfig(**_bert_size(), projection_dim=0)).save_pretrained(folder)
    return folder


def save_qwen3(folder: Path) -> Path:
    """A causal model whose tokenizer adds no special token; id 3 is `<|endoftext|>`."""
    _save_tokenizer(folder, special=("[PAD]", "[UNK]", "<|im_end|>", "<|endoftext|>"), template=False)
    config = Qwen3Config(
        vocab_size=len(WORDS) + 4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3Model(config).save_pretrained(folder)
    return folder


def add_files(folder: Path, pooling: dict, prompts: dict | None = None, normalize: bool = True) -> None:
    """The files of a sentence-transformers model."""
    names = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": path} for name, path in zip(names, paths, strict=False)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))


def _bert_size() -> dict:
    return {
        "vocab_size": len(WORDS) + 4,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 24,
        "initializer_range": 0.5,
    }


def _save_tokenizer(
    folder: Path, special: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]"), template: bool = True
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if template:
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    else:
        names |= {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|endoftext|>"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
