"""The stand-in for a base language model: a byte-level tokenizer and a small Qwen2 made from scratch."""

import re
from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
EOS = "<|endoftext|>"
PAD = "<|pad|>"


# The width of a head, hidden_size / num_attention_heads, must be a multiple of 32 for the sampler's attention kernels.
SHAPE = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
# The usual base of 10,000 is made for thousands of tokens. To copy a name the policy has to look at the token before
# another, which it learns much sooner when more of the rotations are fast (docs/results.md).
POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text round-trips, each tag is one ordinary (not special) id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # tags are cut out before the merges apply, so the merges are learned on what stands between them
    between_tags = re.compile("|".join(TAGS))
    tokenizer.train_from_iterator((part for text in texts for part in between_tags.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def make_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a float32 model with random weights for the tokenizer's vocabulary, head tied to the embedding."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        **HEADS,
        **POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).to(torch.float32)
