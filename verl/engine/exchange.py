"""Sends rows of a batch from the ranks that have them to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from verl.engine.batching import RankValues, flat_positions


def exchange(
    own: RankValues, lengths_B: torch.Tensor, wanted: Sequence[Sequence[int]], device: torch.device
) -> RankValues:
    """The rows `wanted[rank]` of this rank. Each row is sent once, by the rank that has it, to a rank that wants it.

    `own`: this rank's rows of a batch whose rows have `lengths_B` tokens; `wanted`: the same on all ranks. A collective
    on `device`, the process group's. Raises ValueError for a row that no rank has.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    owner_B = _owners(own, len(lengths_B), device)
    if missing := [row for row in wanted[rank] if owner_B[row] < 0]:
        raise ValueError(f"no rank has row {missing[0]} of the batch: its values were not computed")
    if num_ranks == 1:
        return _pick(own, lengths_B, wanted[0])
    sent = [[row for row in rows if owner_B[row] == rank] for rows in wanted]
    received = [[row for row in wanted[rank] if owner_B[row] == source] for source in range(num_ranks)]
    counts = [[_num_tokens(lengths_B, rows) for rows in parts] for parts in (sent, received)]
    outgoing = _pick(own, lengths_B, [row for rows in sent for row in rows])
    arrived = {}
    for name, value_T in outgoing.tokens.items():
        buffer_T = value_T.new_empty(sum(counts[1]), *value_T.shape[1:], device=device)
        dist.all_to_all_single(buffer_T, value_T.to(device), counts[1], counts[0])
        arrived[name] = buffer_T.cpu()
    return RankValues([row for rows in received for row in rows], arrived)


def rows_of(own: RankValues, lengths_B: torch.Tensor, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """[T', ...] by name: the values of `rows`, which must be in `own`, concatenated."""
    return _pick(own, lengths_B, rows).tokens


def _owners(own: RankValues, num_rows: int, device: torch.device) -> list[int]:
    """The rank that has each row; -1 for none."""
    owner_B = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    owner_B[torch.tensor(own.rows, dtype=torch.int64, device=device)] = dist.get_rank()
    dist.all_reduce(owner_B, dist.ReduceOp.MAX)
    return owner_B.tolist()


def _pick(own: RankValues, lengths_B: torch.Tensor, rows: Sequence[int]) -> RankValues:
    if list(rows) == own.rows:
        return own
    place = {row: index for index, row in enumerate(own.rows)}
    index_T = flat_positions(lengths_B[torch.tensor(own.rows, dtype=torch.int64)], [place[row] for row in rows])
    return RankValues(list(rows), {name: value_T[index_T] for name, value_T in own.tokens.items()})


def _num_tokens(lengths_B: torch.Tensor, rows: Sequence[int]) -> int:
    return int(lengths_B[torch.tensor(rows, dtype=torch.int64)].sum())
