"""Write a model of a published shape with random weights: nothing is downloaded, and it is never whole in memory.

    .venv/bin/python scripts/gpu/random_model.py --shape 3b --tokenizer FOLDER --output_dir FOLDER [--device cuda]

It is in bfloat16, with a config.json, in safetensors files. FOLDER of --tokenizer holds a tokenizer that is saved in
tokenizer.json; words without meaning fill it up to the vocabulary of the shape, so that every sampled id is text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from shapes import SHAPES
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.engine.files.saving import plan_files, write_weights
from verl.engine.files.slices import Entry
from verl.pretrained import load_tokenizer

DTYPE = torch.bfloat16
SPREAD = 0.02  # of the matrices, the usual initialization
VALUES_AT_ONCE = 2**24
MAX_FILE_BYTES = 4 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the values are drawn")
    args = parser.parse_args()
    num_parameters = write_model(args.output_dir, args.shape, args.tokenizer, torch.device(args.device))
    print(f"{args.output_dir}: {num_parameters / 1e9:.2f} billion random parameters")


def write_model(folder: Path, shape: str, tokenizer: Path, device: torch.device, seed: int = 0) -> int:
    """Returns the number of parameters. The same seed gives the same values on the same kind of device."""
    filled = fill_up(load_tokenizer(str(tokenizer), False, "--tokenizer"), SHAPES[shape]["vocab_size"])
    num_parameters = write_policy(folder, shape, device, seed, filled.eos_token_id, filled.pad_token_id)
    filled.save_pretrained(folder)
    return num_parameters


def write_policy(
    folder: Path, shape: str, device: torch.device, seed: int = 0, eos: int | None = None, pad: int | None = None
) -> int:
    """The model without a tokenizer. Returns the number of parameters."""
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    config = Qwen2Config(
        **SHAPES[shape], **ids, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype=DTYPE
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    entries = [Entry(name, DTYPE, parameter.shape) for name, parameter in model.named_parameters()]
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    write_weights(folder, random_values(entries, device, seed), plan_files(entries, MAX_FILE_BYTES))
    return sum(entry.shape.numel() for entry in entries)


def random_values(entries: Iterable[Entry], device: torch.device, seed: int) -> Iterator[torch.Tensor]:
    """Flat CPU tensors, one after the other: matrices are normal, norms are 1, biases 0."""
    generator = torch.Generator(device).manual_seed(seed)
    for entry in entries:
        left = entry.shape.numel()
        while left:
            part = torch.empty(min(left, VALUES_AT_ONCE), dtype=entry.dtype, device=device)
            if len(entry.shape) > 1:
                part.normal_(0.0, SPREAD, generator=generator)
            else:
                part.fill_(0.0 if entry.name.endswith("bias") else 1.0)
            yield part.cpu()
            left -= len(part)


def fill_up(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PreTrainedTokenizerFast:
    """The same tokenizer with words that no text is cut into, up to `vocab_size`."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words |= {token["content"]: token["id"] for token in state["added_tokens"]}
    words |= {f"\u0120filler{number}": number for number in range(len(words), vocab_size)}  # U+0120 stands for a space
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
