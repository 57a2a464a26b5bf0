"""The cut of a step's trajectories into mini-batches (one optimizer step each), and of those into what memory holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from verl.engine.batching import Budget


def mini_batches(num_rows: int, size: int, epochs: int, shuffle: bool, seed: int, step: int) -> Iterator[list[int]]:
    """Row numbers of each mini-batch: `epochs` passes, in order or shuffled anew each pass from `seed` and `step`."""
    generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)
        yield from (part.tolist() for part in order.split(size))


def mean_of(results: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean over mini-batches of each named number, as `{prefix}/{name}`; {} for no result."""
    names = results[0] if results else ()
    return {f"{prefix}/{name}": sum(result[name] for result in results) / len(results) for name in names}


def micro_budget(by_tokens: bool, max_tokens: int, micro_batch_size: int) -> Budget:
    """What one pass may hold on a rank: row limits are configured over all ranks, token limits per rank."""
    if by_tokens:
        return Budget(tokens=max_tokens)
    return Budget(rows=max(1, micro_batch_size // dist.get_world_size()))
