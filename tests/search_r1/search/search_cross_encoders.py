"""Small untrained cross-encoders in Hugging Face format, and the scores that they must give."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

_WORDS = (
    '( ) : . ? " title the of a in is was by who what where which city country river capital singer volcano album '
    "actor book morn tarsia lune osk anna velt beyonce paint born erupt ##s ##ed"
)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS.split()]
POSITIONS = 64
_CLS, _SEP = 2, 3


def save_cross_encoder(folder: Path, seed: int = 0, num_labels: int = 1, **config: Any) -> Path:
    """2 layers of width 32, 64 positions, a WordPiece tokenizer; safetensors. `config`: further keys of config.json."""
    _save_tokenizer(folder)
    size = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        initializer_range=0.5,
        num_labels=num_labels,
        **config,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertForSequenceClassification(size).save_pretrained(folder)
    return folder


def ids(text: str) -> list[int]:
    """Token ids looked up by hand: words and signs in lower case, `##s` and `##ed` as endings, else [UNK]."""
    found = []
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        stem, ending = next(((word[: -len(end)], f"##{end}") for end in ("s", "ed") if word.endswith(end)), (word, ""))
        whole = word in VOCABULARY or stem not in VOCABULARY
        found += [_id(word)] if whole else [_id(stem), _id(ending)]
    return found


def logit(folder: Path, query_ids: list[int], passage_ids: list[int]) -> float:
    """The float64 score of one pair alone."""
    first, second = [_CLS, *query_ids, _SEP], [*passage_ids, _SEP]
    types = torch.tensor([[0] * len(first) + [1] * len(second)])
    with torch.no_grad():
        return float(_exact_model(folder)(input_ids=torch.tensor([first + second]), token_type_ids=types).logits[0, 0])


@lru_cache
def _exact_model(folder: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(folder).double().eval()


def score(folder: Path, query: str, title: str, text: str) -> float:
    """The float64 score of a query and a passage with this title, which keeps its quotes."""
    return logit(folder, ids(query), ids(f'(Title: "{title}") {text}'))


def _id(piece: str) -> int:
    return VOCABULARY.index(piece) if piece in VOCABULARY else 1


def _save_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", _CLS), ("[SEP]", _SEP)]
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
