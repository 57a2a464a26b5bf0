"""Cutting a batch: rows over ranks, a rank's rows into micro-batches, a micro-batch into tensors for the model.

Every rank sees the whole batch and works out the cut of all ranks, so no communication is needed. All ranks run the
same number of micro-batches (sharded models meet in every forward); a rank with too few runs fillers of zero loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl.protocol import TrainBatch


@dataclass(frozen=True)
class Budget:
    """How large a micro-batch may be on one rank: `tokens` (padding counted) or a fixed number of `rows`."""

    tokens: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.rows is None):
            raise ValueError("a micro-batch is limited either by tokens or by rows")


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch. `ids_BL` and `position_ids_BL` go into the decoder (`position_ids_BL` None: 0.. in each row).

    `select_N` indexes the flattened [B * L] hidden states that predict the selected tokens, `token_N` the same tokens
    in the micro-batch's own flat [T] order (on the CPU, where the batch is), `label_N` their ids.
    """

    ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor | None
    select_N: torch.Tensor
    token_N: torch.Tensor
    label_N: torch.Tensor


class RankValues(NamedTuple):
    """One rank's answer: row numbers, and CPU values [T, ...] by name of those rows one after the other (0 where
    unmasked). `merge_rows` puts the answers of all ranks together.
    """

    rows: list[int]
    tokens: dict[str, torch.Tensor]


def split_rows(lengths_B: torch.Tensor, num_ranks: int) -> list[list[int]]:
    """Rows of each rank, in the batch's order: longest first to the rank with the fewest tokens so far."""
    lengths = lengths_B.tolist()
    loads = [(0, rank) for rank in range(num_ranks)]
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = heapq.heappop(loads)
        rows[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], rank))
    return [sorted(part) for part in rows]


def cut(lengths_B: torch.Tensor, rows: Sequence[int], budget: Budget) -> list[list[int]]:
    """The given rows in micro-batches within `budget`; a row longer than the token budget goes alone.

    With a token budget rows are sorted by length, so that padding is small; with a row budget they keep their order.
    """
    if budget.rows is not None:
        return [list(rows[i : i + budget.rows]) for i in range(0, len(rows), budget.rows)]
    assert budget.tokens is not None
    lengths = lengths_B.tolist()
    parts: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda i: -lengths[i]):
        if not parts or (len(parts[-1]) + 1) * longest > budget.tokens:
            parts.append([])
            longest = lengths[row]  # sorted by falling length: the first of a micro-batch is its longest
        parts[-1].append(row)
    return parts


def plan(lengths_B: torch.Tensor, rows: Sequence[int], num_ranks: int, rank: int, budget: Budget) -> list[list[int]]:
    """This rank's micro-batches (lists of row numbers) of the given rows; empty lists stand for fillers."""
    subset = split_rows(lengths_B[torch.as_tensor(rows, dtype=torch.int64)], num_ranks)
    cuts = [cut(lengths_B, [rows[i] for i in part], budget) for part in subset]
    num_micro_batches = max(len(parts) for parts in cuts)
    return cuts[rank] + [[] for _ in range(num_micro_batches - len(cuts[rank]))]


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


def model_input(batch: TrainBatch, device: torch.device, packed: bool) -> ModelInput:
    """Tensors of one micro-batch: right-padded rows, or (`packed`) one row of all tokens with restarting positions.

    Right padding needs no attention mask: a causal model never looks to the right. An empty batch gives one token of
    which nothing is selected.
    """
    if not len(batch):
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return ModelInput(torch.zeros(1, 1, dtype=torch.int64, device=device), None, empty, empty.cpu(), empty)
    token_N = selected_tokens(batch)
    label_N = labels_of(batch)[token_N]
    starts_B = batch.lengths_B.cumsum(0) - batch.lengths_B
    if packed:
        position_T = torch.arange(len(batch.tokens["ids"])) - starts_B.repeat_interleave(batch.lengths_B)
        ids_BL, position_ids_BL, select_N = batch.tokens["ids"][None], position_T[None], token_N - 1
    else:
        ids_BL, position_ids_BL = batch.padded("ids"), None
        row_N = batch.row_of_token_T[token_N]
        select_N = row_N * ids_BL.shape[1] + (token_N - starts_B[row_N]) - 1
    return ModelInput(
        ids_BL.to(device),
        None if position_ids_BL is None else position_ids_BL.to(device),
        select_N.to(device),
        token_N,
        label_N.to(device),
    )


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


def flat_positions(lengths_B: torch.Tensor, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """[T'] int64: where the tokens of `rows`, one row after the other, lie in the whole batch's flat order."""
    index_B = torch.as_tensor(rows, dtype=torch.int64)
    own_lengths_B = lengths_B[index_B]
    shift_B = (lengths_B.cumsum(0) - lengths_B)[index_B] - (own_lengths_B.cumsum(0) - own_lengths_B)
    return torch.arange(int(own_lengths_B.sum())) + shift_B.repeat_interleave(own_lengths_B)
