"""Cutting a batch: into mini-batches, rows over ranks, and a rank's rows into micro-batches.

Every rank sees the whole batch and works out the cut of all ranks, so no communication is needed. All ranks run the
same number of micro-batches (sharded models meet in every forward); a rank with too few runs fillers of zero loss.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from verl.config.rules.predicates import num_mini_batches
from verl.engine.batching import Layout, Prefixes
from verl.protocol import TrainBatch

PIECES_PER_PART = (1, 2, 4, 8)  # at least, of rows with one prefix: few share more, many balance better


@dataclass(frozen=True)
class Budget:
    """How large a micro-batch may be on one rank: at most so many `tokens` (padding counted) or so many `rows`."""

    tokens: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.rows is None):
            raise ValueError("a micro-batch is limited either by tokens or by rows")


def split_rows(lengths_B: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """Rows in as many parts of about as many tokens, each in the batch's order."""
    pieces = (([row], length) for row, length in enumerate(lengths_B.tolist()))
    return _balanced(pieces, num_ranks, len(lengths_B))


def plan(
    lengths_B: torch.Tensor,
    num_ranks: int,
    rank: int,
    budget: Budget,
    layout: Layout,
    prefixes: Prefixes | None = None,
    unit_B: torch.Tensor | None = None,
) -> list[list[int]]:
    """This rank's micro-batches; see `plan_all`."""
    return plan_all(lengths_B, num_ranks, budget, layout, prefixes, unit_B)[rank]


def plan_all(
    lengths_B: torch.Tensor,
    num_ranks: int,
    budget: Budget,
    layout: Layout,
    prefixes: Prefixes | None = None,
    unit_B: torch.Tensor | None = None,
) -> list[list[list[int]]]:
    """Each rank's micro-batches (lists of row numbers) of a batch; empty lists stand for fillers.

    The ranks of a sequence group have the same ones; `budget` is what the group may hold. `prefixes`, as
    `Layout.prefixes` gives them, are counted once in a micro-batch.

    Packed: as few micro-batches as the budget allows, of equal cost on all ranks and one after the other, so that
    neither time nor memory is spent on the largest; rows with one prefix lie together as far as that allows. Padded:
    rows of like length together. Either way the micro-batches that run at the same time on all ranks cost about the
    same; a row longer than the token budget goes alone.

    Rows with the same number in `unit_B` [B] int64 (None: there are none) go together as if they were one row, and
    share no prefix where there are such.
    """
    if unit_B is not None and len(unit_B.unique()) < len(unit_B):
        num_U = unit_B.unique(return_counts=True)[1]
        rows_U = [rows.tolist() for rows in unit_B.argsort(stable=True).split(num_U.tolist())]
        if layout.packed:
            length_U = torch.stack([lengths_B[rows].sum() for rows in rows_U])
            planned = plan_all(length_U, num_ranks, budget, layout)
        else:
            longest_U = [int(lengths_B[rows].max()) for rows in rows_U]
            planned = _by_length(longest_U, num_U.tolist(), num_ranks, budget)
        return [
            [[row for unit in units for row in rows_U[unit]] for units in micro_batches] for micro_batches in planned
        ]
    lengths = lengths_B.tolist()
    if not layout.packed:
        return _by_length(lengths, [1] * len(lengths), num_ranks, budget)
    prefixes = prefixes or Prefixes.none(len(lengths))

    def cost(rows: Sequence[int]) -> float:
        shared = prefixes.shared_lengths(rows)
        return sum(layout.cost(lengths[row]) - layout.cost(n) for row, n in zip(rows, shared, strict=True))

    # Larger pieces of rows with one prefix compute less, smaller ones balance better, so all sizes are tried. A round
    # takes as long as its dearest part, which is the first: the parts of a cut are sorted by falling cost.
    num_groups = num_ranks // layout.ranks_per_row

    def seconds(parts: Sequence[Sequence[int]]) -> float:
        return sum(map(cost, parts[::num_groups]))

    cuts = [
        sorted(_fewest(lengths, prefixes, cost, num_groups, budget, num_pieces), key=cost, reverse=True)
        for num_pieces in (PIECES_PER_PART if prefixes.any else PIECES_PER_PART[:1])
    ]
    parts = min(cuts, key=seconds)
    return [parts[rank // layout.ranks_per_row :: num_groups] for rank in range(num_ranks)]


def _fewest(
    lengths: Sequence[int],
    prefixes: Prefixes,
    cost: Callable[[Sequence[int]], float],
    num_ranks: int,
    budget: Budget,
    num_pieces: int,
) -> list[list[int]]:
    """Parts of balanced cost within `budget`: the smallest multiple of `num_ranks` that does it. Rows with one prefix
    go together, in pieces of which a part has at least `num_pieces`.
    """
    rows_at_most = budget.rows or len(lengths)

    def num_tokens(rows: Sequence[int]) -> int:
        return sum(lengths[row] for row in rows) - sum(prefixes.shared_lengths(rows))

    # A lower bound: rounds that would do if rows could be cut anywhere.
    all_rows = range(len(lengths))
    if budget.tokens is None:
        num_rounds = -(-len(lengths) // (num_ranks * rows_at_most))
    else:
        own = [lengths[row] - n for row, n in zip(all_rows, prefixes.shared_lengths(all_rows), strict=True)]
        num_rounds = -(-sum(min(length, budget.tokens) for length in own) // (num_ranks * budget.tokens))

    # From there one more round at a time, until every part is within the budget, or is a single row.
    total = cost(all_rows)
    for num_parts in count(max(1, num_rounds) * num_ranks, num_ranks):
        pieces = prefixes.pieces(cost, total / num_parts / num_pieces)
        parts = _balanced(pieces, num_parts, rows_at_most)
        if budget.tokens is None or all(len(rows) <= 1 or num_tokens(rows) <= budget.tokens for rows in parts):
            break
    return parts


def _balanced(pieces: Iterable[tuple[list[int], float]], num_parts: int, max_rows: int) -> list[list[int]]:
    """Each piece (rows and their cost), dearest first, goes to the cheapest part that has room for it, or row by row
    where none has; a part's rows are in the batch's order.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_parts = [(0.0, part) for part in range(num_parts)]
    waiting = deque(sorted(pieces, key=lambda piece: -piece[1]))
    while waiting:
        # Parts without room for this piece are set aside; a smaller piece may still find room there.
        rows, cost = waiting.popleft()
        too_full = []
        while open_parts and len(parts[open_parts[0][1]]) + len(rows) > max_rows:
            too_full.append(heapq.heappop(open_parts))
        if open_parts:
            spent, part = open_parts[0]
            parts[part] += rows
            heapq.heapreplace(open_parts, (spent + cost, part))
        else:
            # No part takes the piece as a whole: its rows are the next pieces, in their order.
            waiting.extendleft(([row], cost / len(rows)) for row in reversed(rows))
        for entry in too_full:
            if len(parts[entry[1]]) < max_rows:
                heapq.heappush(open_parts, entry)
    return [sorted(rows) for rows in parts]


def _by_length(
    lengths: Sequence[int], num_rows: Sequence[int], num_ranks: int, budget: Budget
) -> list[list[list[int]]]:
    """Units of `num_rows` rows by falling length of their longest, dealt to all ranks in rounds. All rows are padded to
    a round's longest one, and padding counts towards a token budget; in a budget of rows a unit is one.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds: list[list[int]] = [[]]
    rows_so_far = 0
    for start in range(0, len(order), num_ranks):
        dealt = order[start : start + num_ranks]
        rows = max(num_rows[unit] for unit in dealt) if budget.rows is None else 1
        # Lengths fall, so the first unit of a round is its longest.
        longest = max(1, lengths[(rounds[-1] or dealt)[0]])
        if rounds[-1] and rows_so_far + rows > (budget.rows or (budget.tokens or 0) // longest):
            rounds.append([])
            rows_so_far = 0
        rounds[-1] += dealt
        rows_so_far += rows
    return [[units[rank::num_ranks] for units in rounds] for rank in range(num_ranks)]


def mini_batches(
    rollouts: Sequence[int], size: int, epochs: int, shuffle: bool, seed: int, step: int
) -> Iterator[list[int]]:
    """The numbers of each mini-batch's rollouts: `epochs` passes, in order or reshuffled each pass from `seed` and
    `step`.

    A pass is cut evenly into as many as come nearest to `size` rollouts each: 2050 of 256 are two mini-batches of 257
    and six of 256. A ninth of 2, normalised by its own tokens, would move the weights as far as the others do.
    Nothing but the arguments decides, so all ranks, however many they are, get the same cut.
    """
    generator = torch.Generator().manual_seed(hash((seed, step)) % 2**63)
    all_R = torch.as_tensor(rollouts, dtype=torch.int64)
    for _ in range(epochs if len(all_R) else 0):
        order_R = all_R[torch.randperm(len(all_R), generator=generator)] if shuffle else all_R
        yield from (part.tolist() for part in order_R.tensor_split(num_mini_batches(len(all_R), size)))


def mean_of(results: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean over mini-batches of each named number, as `{prefix}/{name}`; {} for no result."""
    names = results[0] if results else ()
    return {f"{prefix}/{name}": sum(result[name] for result in results) / len(results) for name in names}


def micro_budget(by_tokens: bool, max_tokens: int, micro_batch_size: int, ranks_per_row: int = 1) -> Budget:
    """The budget of one pass on the ranks that share it: row limits are configured over all ranks, token limits per
    rank.
    """
    if by_tokens:
        return Budget(tokens=max_tokens * ranks_per_row)
    return Budget(rows=max(1, micro_batch_size * ranks_per_row // dist.get_world_size()))


def rows_of_ranks(batch: TrainBatch, parts: Sequence[Sequence[int]], budget: Budget, layout: Layout) -> list[list[int]]:
    """The rows that each rank works on in any of these mini-batches, `parts` of the batch's rows."""
    rows_of_rank: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    for part in parts:
        # Prefixes depend on which rows a mini-batch has, so they are those that its update finds.
        mini_batch = batch.select(part)
        related = layout.prefixes(mini_batch), layout.units(mini_batch)
        plans = plan_all(mini_batch.lengths_B, len(rows_of_rank), budget, layout, *related)
        for rows, micro_batches in zip(rows_of_rank, plans, strict=True):
            rows.update(part[row] for micro_batch in micro_batches for row in micro_batch)
    return [sorted(rows) for rows in rows_of_rank]
