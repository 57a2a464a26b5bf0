"""Cutting a batch: rows over ranks, a rank's rows into micro-batches, a micro-batch into tensors for the model.

Every rank sees the whole batch and works out the cut of all ranks, so no communication is needed. All ranks run the
same number of micro-batches (sharded models meet in every forward); a rank with too few runs fillers of zero loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from verl.engine.sequence_parallel import SequenceGroup, SequenceShare
from verl.protocol import TrainBatch, flat_positions


@dataclass(frozen=True)
class Budget:
    """How large a micro-batch may be on one rank: at most so many `tokens` (padding counted) or so many `rows`."""

    tokens: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.rows is None):
            raise ValueError("a micro-batch is limited either by tokens or by rows")


@dataclass(frozen=True)
class Layout:
    """How the rows of a micro-batch lie: `packed` one after the other in one long row, or right-padded.

    A row of L tokens costs L + `square` L^2: the products with weights, and the attention (`model.attention_cost`).
    `sequence`: the ranks that share each micro-batch with this one, all groups of one size; packed rows only.
    """

    packed: bool
    square: float = 0.0
    sequence: SequenceGroup | None = None

    def __post_init__(self) -> None:
        if self.sequence is not None and not self.packed:
            raise ValueError("ranks share packed rows only")

    @property
    def ranks_per_row(self) -> int:
        """How many ranks work on a row together."""
        return 1 if self.sequence is None else self.sequence.size

    def costs(self, lengths_B: torch.Tensor) -> list[float]:
        """Of each row, in tokens."""
        return [length + self.square * length * length for length in lengths_B.tolist()]


class PackedRows(NamedTuple):
    """Where rows begin in one long row: `lengths` on the host; `starts` [rows + 1] int32, 0 first, on the device."""

    lengths: tuple[int, ...]
    starts: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRows:
        """Empty rows are left out."""
        filled = [length for length in lengths if length]
        starts = torch.tensor([0, *accumulate(filled)], dtype=torch.int32)
        return cls(tuple(filled), starts.to(device))

    def attention_arguments(self) -> dict[str, Any]:
        """By the names that Hugging Face gives them for flash-attention, and `row_lengths` for `varlen`."""
        longest = max(self.lengths)
        return {
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": longest,
            "max_length_k": longest,
            "row_lengths": self.lengths,
        }


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch. `ids_BL` and `position_ids_BL` go into the decoder (`position_ids_BL` None: 0.. in each row).

    `select_N` indexes the flattened [B * L] hidden states that predict the selected tokens, `token_N` the same tokens
    in the micro-batch's own flat [T] order (on the CPU, where the batch is), `label_N` their ids. `packed` says where
    rows begin when they lie in one long row. With a `share`, ids, positions and `select_N` are those of this rank's
    slice, and all else is the whole micro-batch's.
    """

    ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor | None
    select_N: torch.Tensor
    token_N: torch.Tensor
    label_N: torch.Tensor
    packed: PackedRows | None = None
    share: SequenceShare | None = None


class RankValues(NamedTuple):
    """One rank's results: row numbers, and CPU values [T, ...] by name of those rows one after the other (0 where
    unmasked). `merge_rows` merges those of all ranks.
    """

    rows: list[int]
    tokens: dict[str, torch.Tensor]


def split_rows(lengths_B: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """Rows in as many parts of about as many tokens, each in the batch's order."""
    return _balanced(lengths_B.tolist(), num_ranks, len(lengths_B))


def plan(lengths_B: torch.Tensor, num_ranks: int, rank: int, budget: Budget, layout: Layout) -> list[list[int]]:
    """This rank's micro-batches; see `plan_all`."""
    return plan_all(lengths_B, num_ranks, budget, layout)[rank]


def plan_all(lengths_B: torch.Tensor, num_ranks: int, budget: Budget, layout: Layout) -> list[list[list[int]]]:
    """Each rank's micro-batches (lists of row numbers) of a batch; empty lists stand for fillers.

    The ranks of a sequence group have the same ones; `budget` is what the group may hold.

    Packed: as few micro-batches as the budget allows, of equal cost on all ranks and one after the other, so that
    neither time nor memory is spent on the largest. Padded: rows of like length together. Either way the micro-batches
    that run at the same time on all ranks cost about the same; a row longer than the token budget goes alone.
    """
    if not layout.packed:
        return _by_length(lengths_B.tolist(), num_ranks, budget)
    costs = layout.costs(lengths_B)
    num_groups = num_ranks // layout.ranks_per_row
    parts = _fewest(lengths_B.tolist(), costs, num_groups, budget)
    parts.sort(key=lambda rows: -sum(costs[row] for row in rows))
    return [parts[rank // layout.ranks_per_row :: num_groups] for rank in range(num_ranks)]


def _fewest(lengths: Sequence[int], costs: Sequence[float], num_ranks: int, budget: Budget) -> list[list[int]]:
    """Parts of balanced cost within `budget`: the smallest multiple of `num_ranks` that does it."""
    if budget.rows is not None:
        num_rounds = max(1, -(-len(lengths) // (num_ranks * budget.rows)))
        return _balanced(costs, num_ranks * num_rounds, budget.rows)
    assert budget.tokens is not None
    num_rounds = max(1, -(-sum(min(length, budget.tokens) for length in lengths) // (num_ranks * budget.tokens)))
    while True:
        parts = _balanced(costs, num_ranks * num_rounds, len(lengths))
        if all(len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget.tokens for rows in parts):
            return parts
        num_rounds += 1


def _balanced(costs: Sequence[float], num_parts: int, max_rows: int) -> list[list[int]]:
    """Each row, dearest first, goes to the cheapest part that has room; a part's rows are in the batch's order."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_parts = [(0.0, part) for part in range(num_parts)]
    for row in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, part = heapq.heappop(open_parts)
        parts[part].append(row)
        if len(parts[part]) < max_rows:
            heapq.heappush(open_parts, (cost + costs[row], part))
    return [sorted(rows) for rows in parts]


def _by_length(lengths: Sequence[int], num_ranks: int, budget: Budget) -> list[list[list[int]]]:
    """Rows by falling length, dealt to all ranks in rounds; padding counts towards a token budget."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds: list[list[int]] = []
    start = 0
    while start < len(order) or not rounds:
        longest = max(1, lengths[order[start]]) if order else 1
        num_rows = budget.rows or max(1, (budget.tokens or 0) // longest)
        rounds.append(order[start : start + num_rows * num_ranks])
        start += num_rows * num_ranks
    return [[rows[rank::num_ranks] for rows in rounds] for rank in range(num_ranks)]


def labels_of(batch: TrainBatch) -> torch.Tensor:
    """[T] int64: what each token's log-prob is taken of: `tokens["labels"]` where given, else the ids themselves."""
    return batch.tokens.get("labels", batch.tokens["ids"])


def selected_tokens(batch: TrainBatch) -> torch.Tensor:
    """[N] int64 flat positions of the loss mask's tokens; a row's first token has no prediction and is never one."""
    mask_T = batch.tokens["loss_mask"].clone()
    mask_T[(batch.lengths_B.cumsum(0) - batch.lengths_B)[batch.lengths_B > 0]] = False
    return mask_T.nonzero().squeeze(-1)


def trained_rows(batch: TrainBatch) -> list[int]:
    """The rows that have a token to train on, in order; a mini-batch is counted in these."""
    return batch.row_of_token_T[selected_tokens(batch)].unique().tolist()


def model_input(batch: TrainBatch, device: torch.device, layout: Layout) -> ModelInput:
    """Tensors of one micro-batch: right-padded rows, or (packed) one row of all tokens with restarting positions.

    Right padding needs no attention mask: a causal model never looks to the right. An empty batch gives one token of
    which nothing is selected.
    """
    if not len(batch.tokens["ids"]):
        empty = torch.zeros(0, dtype=torch.int64)
        return _laid_out(torch.zeros(1, dtype=torch.int64), [1], empty, empty, empty, device, layout)
    token_N = selected_tokens(batch)
    label_N = labels_of(batch)[token_N]
    if layout.packed:
        lengths = batch.lengths_B.tolist()
        return _laid_out(batch.tokens["ids"], lengths, token_N - 1, token_N, label_N, device, layout)
    starts_B = batch.lengths_B.cumsum(0) - batch.lengths_B
    ids_BL, row_N = batch.padded("ids"), batch.row_of_token_T[token_N]
    select_N = row_N * ids_BL.shape[1] + (token_N - starts_B[row_N]) - 1
    return ModelInput(ids_BL.to(device), None, select_N.to(device), token_N, label_N.to(device))


def _laid_out(
    ids_T: torch.Tensor,
    lengths: list[int],
    select_N: torch.Tensor,
    token_N: torch.Tensor,
    label_N: torch.Tensor,
    device: torch.device,
    layout: Layout,
) -> ModelInput:
    """One row of all tokens, or this rank's slice of it; `select_N` rises."""
    filling = -len(ids_T) % layout.ranks_per_row  # a row of its own, which nobody else sees
    lengths = [*lengths, filling]
    ids_T = functional.pad(ids_T, (0, filling))
    position_T = torch.cat([torch.arange(length) for length in lengths])
    share = None
    if layout.sequence is not None:
        borders = torch.arange(layout.sequence.size + 1) * (len(ids_T) // layout.sequence.size)
        share = SequenceShare(layout.sequence, tuple(torch.searchsorted(select_N, borders).diff().tolist()))
        start, end = borders[layout.sequence.place : layout.sequence.place + 2].tolist()
        ids_T, position_T, select_N = ids_T[start:end], position_T[start:end], select_N[share.own] - start
    rows = PackedRows.of(lengths, device) if layout.packed else None
    ids_1T, position_1T = ids_T[None].to(device), position_T[None].to(device)
    return ModelInput(ids_1T, position_1T, select_N.to(device), token_N, label_N.to(device), rows, share)


def values_at(batch: TrainBatch, name: str, inputs: ModelInput) -> torch.Tensor:
    """`batch.tokens[name]` at the selected tokens, on the model's device. Raises ValueError when it is not there."""
    if name not in batch.tokens:
        raise ValueError(f"the batch has no tokens['{name}']; it has {', '.join(batch.tokens)}")
    return batch.tokens[name][inputs.token_N].to(inputs.label_N.device)


def merge_rows(
    lengths_B: torch.Tensor, parts: Sequence[tuple[Sequence[int] | torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The whole batch's [T, ...] values from `(rows, values of these rows one after the other)` of each rank."""
    first_T = parts[0][1]
    merged_T = first_T.new_zeros(int(lengths_B.sum()), *first_T.shape[1:])
    for rows, value_T in parts:
        merged_T[flat_positions(lengths_B, rows)] = value_T
    return merged_T


def own_values(
    lengths_B: torch.Tensor, micro_batches: Sequence[Sequence[int]], tokens: Mapping[str, torch.Tensor]
) -> RankValues:
    """Of the whole batch's `tokens` [T, ...] those of the rows in this rank's micro-batches."""
    own = sorted(row for rows in micro_batches for row in rows)
    index_T = flat_positions(lengths_B, own)
    return RankValues(own, {name: value_T[index_T] for name, value_T in tokens.items()})
