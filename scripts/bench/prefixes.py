"""Prompts that rows share, computed once or in every row: tokens and time of simulated ranks, and of an update here.

    .venv/bin/python scripts/bench/prefixes.py                                                      # as published
    .venv/bin/python scripts/bench/prefixes.py --prompts 24 --samples 8 --prompt 45 --answer 40 70 --tokens 4096

`--prompts` prompts of `--prompt` tokens with `--samples` answers each, whose lengths are drawn from `--answer`; at most
`--tokens` tokens in a micro-batch. An update is forward and backward of all micro-batches of a small model, both ways
in turn after one that does not count; medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from packing import MODEL, build, update_seconds

from verl.engine.micro_batches import Budget, plan
from verl.engine.model import layout_of
from verl.protocol import TrainBatch

WAYS = {"in every row": False, "once": True}


def sampled_batch(num_prompts: int, samples: int, prompt: int, answer: tuple[int, int], vocabulary: int) -> TrainBatch:
    """Random ids; the answers are trained."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (length,), generator=generator)

    lengths = torch.randint(answer[0], answer[1] + 1, (num_prompts, samples), generator=generator).tolist()
    rows = [torch.cat([ids, draw(length)]) for of_prompt in lengths for ids in [draw(prompt)] for length in of_prompt]
    mask = torch.cat([torch.arange(len(ids)) >= prompt for ids in rows])
    return TrainBatch(torch.tensor([len(ids) for ids in rows]), {"ids": torch.cat(rows), "loss_mask": mask})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=5, help="answers to each prompt")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--answer", type=int, nargs=2, default=(300, 1800), metavar=("FROM", "TO"), help="tokens")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--ranks", type=int, default=8, help="simulated")
    parser.add_argument("--update_rows", type=int, default=40, help="of the update that is measured; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch = sampled_batch(args.prompts, args.samples, args.prompt, args.answer, MODEL["vocab_size"])
    model = build(torch.device("cpu"))
    layouts = {way: layout_of([model.model], True, share_prefixes=once) for way, once in WAYS.items()}
    budget = Budget(tokens=args.tokens)
    figures: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for way, layout in layouts.items():
        prefixes = layout.prefixes(batch)
        lengths = batch.lengths_B.tolist()
        plans = [plan(batch.lengths_B, args.ranks, rank, budget, layout, prefixes) for rank in range(args.ranks)]
        sizes = [
            [sum(lengths[r] for r in rows) - sum(prefixes.shared_lengths(rows)) for rows in parts] for parts in plans
        ]
        figures[way]["tokens"] = sum(map(sum, sizes))
        figures[way]["slowest_rank"] = sum(map(max, zip(*sizes, strict=True)))
    if args.update_rows:
        some = batch.select(range(min(len(batch), args.update_rows)))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds + 1):
            for way, layout in layouts.items():
                cut = plan(some.lengths_B, 1, 0, budget, layout, layout.prefixes(some))
                seconds[way].append(update_seconds(model, some, cut, layout, torch.device("cpu")))
        for way, values in seconds.items():
            figures[way]["update_s"] = statistics.median(values[1:])
    show(figures)
    print(json.dumps(figures))


def show(figures: dict[str, dict[str, float]]) -> None:
    whole, once = figures.values()
    print(f"{'':24}{'in every row':>16}{'once':>16}{'once / in every':>18}")
    for name in whole:
        print(f"{name:24}{whole[name]:16.6g}{once[name]:16.6g}{once[name] / whole[name]:18.3f}")


if __name__ == "__main__":
    main()
