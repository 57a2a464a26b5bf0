"""One update of the SmolLM2 recipe's actor (docs/real_model.md), beside an earlier checkout of this project, on CPU.

    .venv/bin/python scripts/bench/adapter_update.py [--other CHECKOUT] [--rows 32] [--rounds 5]
        [--param_dtype bfloat16]

The model has SmolLM2-135M's shape and random weights, adapters of rank 16 on its last layers, and the recipe's
settings; half of a step's 64 rows, as one of its two processes has them, with one thread. Each side has a process of
its own and they work in turn; medians over the rounds, after one for warming up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
NUM_LAYERS, MEAN_PROMPT, TURNS, PASSAGE, GROUP = 30, 130, (22, 18), 90, 8
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000,
}
MATRICES = [
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def serve(checkout: str, folder: str, num_rows: int, num_layers: int, param_dtype: str) -> None:
    """Make one update of a checkout's engine for each line of standard input."""
    sys.path.insert(0, checkout)
    import torch

    from verl.config import load_config
    from verl.engine.policy_engine import PolicyEngine
    from verl.protocol import TrainBatch

    try:
        from verl.engine.device.runtime import init_process_group
    except ImportError:  # an earlier checkout
        from verl.engine.device import init_process_group  # type: ignore[no-redef,attr-defined]

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(MEAN_PROMPT - 30, MEAN_PROMPT + 30, (num_rows // GROUP,), generator=generator).tolist()
    rows, masks = [], []
    for prompt in prompts:
        shared = torch.randint(3, SHAPE["vocab_size"], (prompt,), generator=generator)
        for _ in range(GROUP):
            passage = int(torch.randint(PASSAGE - 30, PASSAGE + 30, (1,), generator=generator))
            own = torch.randint(3, SHAPE["vocab_size"], (sum(TURNS) + passage,), generator=generator)
            rows.append(torch.cat([shared, own]))
            masks.append(torch.tensor([False] * prompt + [True] * TURNS[0] + [False] * passage + [True] * TURNS[1]))
    lengths_B = torch.tensor([len(row) for row in rows])
    advantage_T = torch.randn(len(rows), generator=generator).repeat_interleave(lengths_B)
    batch = TrainBatch(lengths_B, {"ids": torch.cat(rows), "loss_mask": torch.cat(masks), "advantages": advantage_T})

    layers = range(NUM_LAYERS - num_layers, NUM_LAYERS)
    names = ",".join(f"layers.{layer}.{name}" for layer in layers for name in MATRICES)
    actor, model, device = "actor_rollout_ref.actor", "actor_rollout_ref.model", torch.device("cpu")
    settings = [
        *("data.train_files=-", "data.val_files=-", "trainer.device=cpu", f"{model}.path={folder}"),
        *(f"{model}.lora_rank=16", f"{model}.target_modules=[{names}]", f"{model}.enable_gradient_checkpointing=false"),
        *(f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu=1536"),
        *(f"{actor}.entropy_coeff=0", f"{actor}.num_threads=1", f"{actor}.clip_ratio_high=0.28"),
        f"{actor}.fsdp_config.mixed_precision.param_dtype={param_dtype}",
        f"trainer.default_local_dir={folder}",
    ]
    with tempfile.TemporaryDirectory() as store:
        init_process_group(0, 1, f"file://{store}/store", device)
        engine = PolicyEngine(load_config("ppo_trainer", settings), device, 1000, with_anchor=False)
        for _ in sys.stdin:
            start = time.perf_counter()
            engine.update_and_score(batch)
            print(
                "\n" + json.dumps({"seconds": time.perf_counter() - start, "tokens": len(batch.tokens["ids"])}),
                flush=True,
            )


class Side:
    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []

    def update(self) -> int:
        """Make one update and return its tokens. Raises RuntimeError when the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("update\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                self.seconds.append(found["seconds"])
                return int(found["tokens"])
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", metavar="CHECKOUT", help="a folder with an earlier verl/ and configs/")
    parser.add_argument("--rows", type=int, default=32, help=f"a multiple of {GROUP}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--param_dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        checkout, folder, rows, layers, param_dtype = args.serve
        serve(checkout, folder, int(rows), int(layers), param_dtype)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        sides = [Side(f"{layers} layers", HERE, folder, args.rows, layers, args.param_dtype) for layers in (15, 10)]
        if args.other:
            other = Path(args.other).resolve()
            sides.append(Side("15 layers, other", other, folder, args.rows, 15, args.param_dtype))
        try:
            for _ in range(args.rounds + 1):
                tokens = [side.update() for side in sides]
        finally:
            for side in sides:
                side.process.kill()
                side.process.wait()
    print(
        f"update of {args.rows} rows, {tokens[0]} tokens, {args.param_dtype}, one thread; {args.rounds} rounds in turn"
    )
    first = statistics.median(sides[0].seconds[1:])
    for side in sides:
        seconds = side.seconds[1:]
        middle = statistics.median(seconds)
        print(
            f"{side.name:18}{middle:7.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), {middle / first:.2f}x the first"
        )


if __name__ == "__main__":
    main()
