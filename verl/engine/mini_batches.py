"""The cut of a step's trajectories into mini-batches (one optimizer step each), and of those into what memory holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from verl.config.counts import num_mini_batches
from verl.engine.batching import Layout
from verl.engine.micro_batches import Budget, plan_all
from verl.protocol import TrainBatch


def mini_batches(
    rows: Sequence[int], size: int, epochs: int, shuffle: bool, seed: int, step: int
) -> Iterator[list[int]]:
    """The row numbers of each mini-batch: `epochs` passes, in order or reshuffled each pass from `seed` and `step`.

    A pass is cut evenly into as many as come nearest to `size` rows each: 2050 rows of 256 are two mini-batches of 257
    and six of 256. A ninth of 2 rows, normalised by its own tokens, would move the weights as far as the others do.
    Nothing but the arguments decides, so all ranks, however many they are, get the same cut.
    """
    generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
    all_rows = torch.as_tensor(rows, dtype=torch.int64)
    for _ in range(epochs if len(all_rows) else 0):
        order = all_rows[torch.randperm(len(all_rows), generator=generator)] if shuffle else all_rows
        yield from (part.tolist() for part in order.tensor_split(num_mini_batches(len(all_rows), size)))


def mean_of(results: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean over mini-batches of each named number, as `{prefix}/{name}`; {} for no result."""
    names = results[0] if results else ()
    return {f"{prefix}/{name}": sum(result[name] for result in results) / len(results) for name in names}


def micro_budget(by_tokens: bool, max_tokens: int, micro_batch_size: int, ranks_per_row: int = 1) -> Budget:
    """What one pass may hold on the ranks that share it: row limits are configured over all ranks, token limits per
    rank.
    """
    if by_tokens:
        return Budget(tokens=max_tokens * ranks_per_row)
    return Budget(rows=max(1, micro_batch_size * ranks_per_row // dist.get_world_size()))


def rows_of_ranks(batch: TrainBatch, parts: Sequence[Sequence[int]], budget: Budget, layout: Layout) -> list[list[int]]:
    """The rows that each rank works on in any of these mini-batches, `parts` of the batch's rows."""
    rows_of_rank: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    prefixes = layout.prefixes(batch)
    for part in parts:
        lengths_B = batch.lengths_B[torch.tensor(part)]
        plans = plan_all(lengths_B, len(rows_of_rank), budget, layout, prefixes.select(part))
        for rows, micro_batches in zip(rows_of_rank, plans, strict=True):
            rows.update(part[row] for micro_batch in micro_batches for row in micro_batch)
    return [sorted(rows) for rows in rows_of_rank]
