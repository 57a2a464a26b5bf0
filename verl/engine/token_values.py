"""Values of a batch's tokens under one model, micro-batch by micro-batch: of passes without a gradient (`read_tokens`),
and of an update's own (`TokenScores`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from verl.engine.batching import Layout, ModelInput, RankValues, flat_positions, model_input, values_of_own_rows
from verl.engine.model import CausalModel, ReferencePolicy
from verl.protocol import TrainBatch

POLICY_SCORES = ("log_prob", "entropy")
ReadTokens = Callable[[ModelInput], Mapping[str, torch.Tensor]]
"""A function that returns values [N, ...] of a micro-batch's selected tokens, by name."""


@torch.no_grad()
def read_tokens(
    batch: TrainBatch,
    micro_batches: Iterable[Sequence[int]],
    device: torch.device,
    layout: Layout,
    read: ReadTokens,
) -> dict[str, torch.Tensor]:
    """[T, ...] on the CPU: what `read` returns at the loss mask's tokens of `micro_batches`, 0 elsewhere.

    `micro_batches` are lists of row numbers, as `micro_batches.plan` gives them.
    """
    columns: dict[str, torch.Tensor] = {}
    for rows in micro_batches:
        inputs = model_input(batch.select(rows), device, layout)
        _place(columns, batch.lengths_B, rows, inputs.token_N, read(inputs))
    return columns


def policy_scores(model: CausalModel | ReferencePolicy, temperature: float, top_k: int = 0) -> ReadTokens:
    """A reader of `log_prob` and `entropy` [N] float32 of policy or anchor; logits are divided by `temperature` first.

    `top_k` adds `top_index` [N, k] int32: the most likely ids at each token.
    """

    def read(inputs: ModelInput) -> dict[str, torch.Tensor]:
        stats = model(inputs, temperature, top_k=top_k)
        scores = {"log_prob": stats.log_prob_N.float(), "entropy": stats.entropy_N.float()}
        return scores | ({"top_index": stats.index_Nk.to(torch.int32)} if top_k else {})

    model.eval()
    return read


class TokenScores:
    """The values that the forward passes of an update computed, token by token. They stay on the device until
    `of_rank`: a copy to the host would wait for the device in every micro-batch.
    """

    def __init__(self, lengths_B: torch.Tensor, names: Sequence[str]) -> None:
        self.lengths_B, self.names = lengths_B, names
        self._parts: list[tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]] = []

    def add(self, rows: list[int], inputs: ModelInput, scores: dict[str, torch.Tensor]) -> None:
        """Keep `scores` of the selected tokens [N] of a micro-batch, which has these `rows` of the batch."""
        self._parts.append((rows, inputs.token_N, {name: scores[name].float() for name in self.names}))

    def of_rank(self) -> RankValues:
        """The values `names` [T] float32 of the rows that were added."""
        columns = {name: torch.zeros(int(self.lengths_B.sum())) for name in self.names}
        for rows, token_N, scores in self._parts:
            _place(columns, self.lengths_B, rows, token_N, scores)
        return values_of_own_rows(self.lengths_B, [rows for rows, _, _ in self._parts], columns)


def _place(
    columns: dict[str, torch.Tensor],
    lengths_B: torch.Tensor,
    rows: Sequence[int],
    token_N: torch.Tensor,
    values: Mapping[str, torch.Tensor],
) -> None:
    """Put the values of a micro-batch where its tokens are in the whole batch."""
    index_N = flat_positions(lengths_B, rows)[token_N]
    for name, value_N in values.items():
        if name not in columns:
            columns[name] = torch.zeros(int(lengths_B.sum()), *value_N.shape[1:], dtype=value_N.dtype)
        columns[name][index_N] = value_N.cpu()


# Rows of a batch go from the ranks that have them to the ranks that need them.


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

    # Every rank works out by itself which rows it sends to, and receives from, each of the others.
    sent = [[row for row in rows if owner_B[row] == rank] for rows in wanted]
    received = [[row for row in wanted[rank] if owner_B[row] == source] for source in range(num_ranks)]
    lengths = lengths_B.tolist()
    num_sent, num_received = ([sum(lengths[row] for row in rows) for rows in parts] for parts in (sent, received))

    outgoing = _pick(own, lengths_B, [row for rows in sent for row in rows])
    arrived = {}
    for name, value_T in outgoing.tokens.items():
        buffer_T = value_T.new_empty(sum(num_received), *value_T.shape[1:], device=device)
        dist.all_to_all_single(buffer_T, value_T.to(device), num_received, num_sent)
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
