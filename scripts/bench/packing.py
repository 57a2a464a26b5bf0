"""Packed against padded rows: work and balance for simulated ranks, and the time of an update on this machine.

    .venv/bin/python scripts/bench/packing.py [--rows 64] [--ranks 8] [--rounds 5] [--threads 1] [--device cpu]

Rows have the lengths of search trajectories. Three ways of making micro-batches run in turn: rows in the order in which
they come, padded to the longest of each micro-batch; padded with rows of like length together
(use_remove_padding=False); packed (the default). An update here is forward and backward of every micro-batch, with the
log-probs of the trained tokens; speed counts real tokens, not padding; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verl.engine.batching import Layout, model_input
from verl.engine.micro_batches import Budget, plan
from verl.engine.model import CausalModel, layout_of
from verl.protocol import TrainBatch

LONGEST = 4096
SEARCHES = (0.15, 0.45, 0.25, 0.1, 0.05)  # share of trajectories with 0, 1, 2, 3 and 4 searches
PROMPT, THOUGHT, PASSAGES, ANSWER = (150, 300), (40, 200), (350, 520), (40, 300)  # tokens, from and to
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
Cut = list[list[int]]


def search_batch(num_rows: int, seed: int = 0, longest: int = LONGEST, vocabulary: int = 61) -> TrainBatch:
    """Trajectories of prompt, then thought and passages in turn, then an answer: random ids, the model's own trained.

    All sizes are those of a window of 4,096 tokens, scaled to `longest`.
    """
    generator = torch.Generator().manual_seed(seed)

    def part(sizes: tuple[int, int], trained: bool) -> list[bool]:
        size = int(torch.randint(*sizes, (1,), generator=generator))
        return [trained] * max(1, size * longest // LONGEST)

    masks = []
    for searches in torch.multinomial(torch.tensor(SEARCHES), num_rows, True, generator=generator).tolist():
        turns = [flag for _ in range(searches) for flag in part(THOUGHT, True) + part(PASSAGES, False)]
        masks.append((part(PROMPT, False) + turns + part(ANSWER, True))[:longest])
    mask_T = torch.tensor([flag for mask in masks for flag in mask])
    ids_T = torch.randint(0, vocabulary, mask_T.shape, generator=generator)
    return TrainBatch(torch.tensor([len(mask) for mask in masks]), {"ids": ids_T, "loss_mask": mask_T})


def in_order(lengths_B: torch.Tensor, num_ranks: int, rank: int, budget: Budget, layout: Layout) -> Cut:
    """Each rank its share of the rows, `budget.rows` at a time, as they come."""
    rows = torch.arange(len(lengths_B)).tensor_split(num_ranks)[rank].tolist()
    assert budget.rows is not None
    return [rows[start : start + budget.rows] for start in range(0, len(rows), budget.rows)]


WAYS: dict[str, tuple[Callable[..., Cut], bool]] = {
    "padded, in order": (in_order, False),
    "padded, by length": (plan, False),
    "packed": (plan, True),
}


def balance(lengths_B: torch.Tensor, num_ranks: int, budget: Budget, way: str, square: float) -> tuple[float, float]:
    """Tokens computed / real tokens, and the time that all ranks take together / the cost of the real rows shared out.

    Ranks run their micro-batches side by side, and each waits for the slowest.
    """
    cut, packed = WAYS[way]
    layout = Layout(packed, square)

    def sizes(rows: Sequence[int]) -> torch.Tensor:
        own_B = lengths_B[torch.tensor(rows, dtype=torch.int64)]
        return own_B if packed or not rows else own_B.max().expand(len(rows))

    ranks = [[sizes(rows) for rows in cut(lengths_B, num_ranks, rank, budget, layout)] for rank in range(num_ranks)]
    computed = sum(int(sizes_B.sum()) for parts in ranks for sizes_B in parts)

    def cost(sizes_B: torch.Tensor) -> float:
        return sum(layout.cost(length) for length in sizes_B.tolist())

    path = sum(max(cost(sizes_B) for sizes_B in side_by_side) for side_by_side in zip(*ranks, strict=True))
    return computed / int(lengths_B.sum()), path * num_ranks / cost(lengths_B)


def update_seconds(model: CausalModel, batch: TrainBatch, cut: Cut, layout: Layout, device: torch.device) -> float:
    """One forward and backward over all micro-batches."""
    start = time.perf_counter()
    for rows in cut:
        stats = model(model_input(batch.select(rows), device, layout), 1.0, entropy_gradient=False)
        (-stats.log_prob_N).mean().backward()
    model.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def build(device: torch.device) -> CausalModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, **MODEL)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return CausalModel(Qwen2ForCausalLM(config), head_chunk_tokens=None).to(device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="of the update that is measured")
    parser.add_argument("--rows_per_pass", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="simulated")
    parser.add_argument("--longest", type=int, default=2048, help="window of the update that is measured, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    budget = Budget(rows=args.rows_per_pass)
    show_balance(args.ranks, budget)
    show_speed(args, budget)


def show_balance(num_ranks: int, budget: Budget) -> None:
    lengths_B = search_batch(32 * num_ranks).lengths_B
    print(f"\n{len(lengths_B)} rows over {num_ranks} simulated ranks, {budget.rows} rows at most in a pass")
    print(f"{'':20}{'tokens computed / real':>26}{'critical path / ideal':>26}")
    for way in WAYS:
        waste, path = balance(lengths_B, num_ranks, budget, way, square=1.5e-5)  # of a 7B model
        print(f"{way:20}{waste:26.3f}{path:26.3f}")


def show_speed(args: argparse.Namespace, budget: Budget) -> None:
    device = torch.device(args.device)
    batch = search_batch(args.rows, longest=args.longest, vocabulary=MODEL["vocab_size"])
    models = {packed: build(device) for packed in (False, True)}
    layouts = {packed: layout_of([model.model], packed) for packed, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds + 1):  # the first is for warming up
        for way, (make_cut, packed) in WAYS.items():
            cut = make_cut(batch.lengths_B, 1, 0, budget, layouts[packed])
            seconds[way].append(update_seconds(models[packed], batch, cut, layouts[packed], device))
    tokens = int(batch.lengths_B.sum())
    speeds = {way: tokens / statistics.median(values[1:]) for way, values in seconds.items()}
    print(
        f"\nupdate of {args.rows} rows, {tokens} tokens, on {args.device}, {args.threads} threads, {args.rounds} rounds"
    )
    print(f"{'':20}{'tokens/s':>26}{'of the first':>26}")
    for way, speed in speeds.items():
        print(f"{way:20}{speed:26.0f}{speed / speeds[next(iter(WAYS))]:26.2f}")


if __name__ == "__main__":
    main()
