"""Matrix products of a CPU in float32: as PyTorch does them (MKL), and as the engine does them.

    .venv/bin/python scripts/bench/linear.py

One thread, products of a decoder layer's sizes, forward and backward, both sides in turn; medians in GFLOP/s. On
Intel's CPUs, and without AVX-512, the engine leaves them to PyTorch, and both columns are the same thing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional

from verl.engine.device.linear import linear, onednn_is_faster

SIZES = [(128, 384), (384, 128), (896, 4864), (4864, 896)]  # TinyWiki's and Qwen2.5-0.5B's MLPs
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="rows of the input")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"the engine uses {'oneDNN' if onednn_is_faster() else 'what PyTorch does'}")
    print(f"{'in':>6} {'out':>6} {'PyTorch':>9} {'engine':>9} {'ratio':>6}")
    for num_in, num_out in SIZES:
        input = torch.randn(args.tokens, num_in, requires_grad=True)
        weight = torch.randn(num_out, num_in, requires_grad=True)
        pairs = [
            (seconds(functional.linear, input, weight), seconds(linear, input, weight)) for _ in range(args.rounds)
        ]
        giga = 3 * 2 * args.tokens * num_in * num_out / 1e9
        own, ours = (giga / median(column) for column in zip(*pairs, strict=True))
        print(f"{num_in:6} {num_out:6} {own:9.0f} {ours:9.0f} {ours / own:6.2f}")


def seconds(compute: Linear, input: torch.Tensor, weight: torch.Tensor) -> float:
    """Of a forward and its backward, after one that does not count."""
    for _ in range(2):
        start = time.perf_counter()
        output = compute(input, weight)
        torch.autograd.grad(output, (input, weight), output)
        found = time.perf_counter() - start
    return found


if __name__ == "__main__":
    main()
