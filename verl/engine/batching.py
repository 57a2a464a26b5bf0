"""A micro-batch as tensors for the model, and what the model gives of its tokens as columns of the whole batch.

The samples of one prompt (GRPO's group) have the prompt in common, and a causal model computes the same for all of
them. In a packed micro-batch its first row is complete; the others leave the prompt out, and their attention reads the
keys and values of the first row's prompt. So do the sequences of one rollout, as far as they begin like its first one.
The result and the gradient are those of complete rows: what the prompt's gradient is summed over changes its order
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from verl.engine.device.sequence_parallel import SequenceGroup, SequenceShare
from verl.protocol import TrainBatch, flat_positions


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each row: the first row of the batch that has the same one (`first`), and its length in tokens.

    The prefix ends before the token that predicts the row's first selected one, so every row keeps a token of its own
    and no selected token is predicted in a prefix. Where further sequences of a rollout begin like its first one, that
    is their `first`: it is complete itself, all of it their possible prefix, and has no prefix in common with others.
    """

    first: Sequence[int]
    lengths: Sequence[int]

    @classmethod
    def none(cls, num_rows: int) -> Prefixes:
        """The prefixes of rows that share nothing."""
        return cls(range(num_rows), [0] * num_rows)

    @classmethod
    def of(cls, batch: TrainBatch, selected_N: torch.Tensor) -> Prefixes:
        """The prefixes of the batch's rows. `selected_N` int64: flat positions of the tokens whose predictions are
        wanted; none begins a row.
        """
        ends_B = batch.lengths_B.cumsum(0)
        starts_B, row_N = ends_B - batch.lengths_B, batch.row_of_token_T[selected_N]
        until_B = ends_B.scatter_reduce(0, row_N, selected_N, "amin") - 1
        lengths = (until_B - starts_B).clamp(min=0).tolist()
        ids_T, starts = batch.tokens["ids"], starts_B.tolist()

        # A further sequence is compared with the first one of its rollout: how many ids do both begin with?
        own_first = list(range(len(batch)))
        for row, first_row in _further_rows(batch):
            most = min(lengths[row], int(batch.lengths_B[first_row]))
            own_T, first_T = (ids_T[start : start + most] for start in (starts[row], starts[first_row]))
            if length := int((own_T == first_T).cumprod(0).sum()):
                own_first[row], lengths[row] = first_row, length
        in_rollout = {first_row for row, first_row in enumerate(own_first) if row != first_row}
        for first_row in in_rollout:
            lengths[first_row] = int(batch.lengths_B[first_row])

        # All others are found by the ids of their prefix.
        found = dict[bytes, int]()
        first = [
            own_first[row]
            if own_first[row] in in_rollout
            else found.setdefault(ids_T[start : start + length].numpy().tobytes(), row)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        return cls(first, lengths)

    @property
    def any(self) -> bool:
        """Whether two rows have a prefix in common."""
        return any(self.shared_lengths(range(len(self.lengths))))

    def shared_lengths(self, rows: Sequence[int]) -> list[int]:
        """The length of each row's prefix, as far as the first of `rows` with the same one has it; 0 for that row."""
        complete: dict[int, int] = {}
        lengths = []
        for row in rows:
            first_row = complete.setdefault(self.first[row], row)
            lengths.append(0 if first_row == row else min(self.lengths[row], self.lengths[first_row]))
        return lengths

    def pieces(self, cost: Callable[[Sequence[int]], float], limit: float) -> Iterator[tuple[list[int], float]]:
        """The rows, in lists of rows with one prefix, each with its `cost`: at most `limit`, or that of one row."""
        groups: dict[int, list[int]] = {}
        for row, first in enumerate(self.first):
            groups.setdefault(first if self.lengths[row] else row, []).append(row)
        for rows in groups.values():
            size = len(rows) if len(rows) == 1 else max(1, int(len(rows) * limit / cost(rows)))
            for start in range(0, len(rows), size):
                piece = rows[start : start + size]
                yield piece, cost(piece)


def _further_rows(batch: TrainBatch) -> Iterator[tuple[int, int]]:
    """Each row that is not the first of its rollout, with that first one."""
    if batch.num_rollouts == len(batch):
        return
    firsts: dict[int, int] = {}
    for row, rollout in enumerate(batch.rollout_B.tolist()):
        if firsts.setdefault(rollout, row) != row:
            yield row, firsts[rollout]


@dataclass(frozen=True)
class Layout:
    """How the rows of a micro-batch lie: `packed` one after the other in one long row, or right-padded.

    A row of L tokens costs L + `square` L^2: the products with weights, and the attention (`model.attention_cost`).
    `sequence`: the ranks that share each micro-batch with this one, all groups of one size; packed rows only.
    `share_prefixes`: a prompt that several rows of a micro-batch begin with is computed once; packed rows only, and
    without a `sequence` group. `whole_rollouts`: the sequences of a rollout lie in one micro-batch, however long.
    """

    packed: bool
    square: float = 0.0
    sequence: SequenceGroup | None = None
    share_prefixes: bool = False
    whole_rollouts: bool = False

    def __post_init__(self) -> None:
        if (self.sequence is not None or self.share_prefixes) and not self.packed:
            raise ValueError("ranks share packed rows only, and so do rows share a prefix")
        if self.sequence is not None and self.share_prefixes:
            raise ValueError("a slice of the tokens may begin in a prefix that rows share: choose one of the two")

    @property
    def ranks_per_row(self) -> int:
        """How many ranks work on a row together."""
        return 1 if self.sequence is None else self.sequence.size

    def cost(self, length: int) -> float:
        """The cost of a row of `length` tokens, in tokens."""
        return length + self.square * length * length

    def units(self, batch: TrainBatch) -> torch.Tensor:
        """[B] int64: rows with the same number have to lie in one micro-batch."""
        return batch.rollout_B if self.whole_rollouts else torch.arange(len(batch))

    def prefixes(self, batch: TrainBatch) -> Prefixes:
        """The prefixes that rows of `batch` may share in this layout."""
        return Prefixes.of(batch, selected_tokens(batch)) if self.share_prefixes else Prefixes.none(len(batch))


class SharedKeys(NamedTuple):
    """The keys and values that packed rows see, when some of them are another row's.

    `prefix_spans`: for each row the tokens of another that it sees before its own (slices of the packed row), on the
    host; `longest`: the most tokens that a row sees. On the device, of the rows' keys one row after the other: `starts`
    [rows + 1] int32, where each begins, and `tokens` int64, which packed token each is.
    """

    prefix_spans: tuple[slice, ...]
    longest: int
    starts: torch.Tensor
    tokens: torch.Tensor


class PackedRows(NamedTuple):
    """The places of rows in one long row: `lengths` on the host; `starts` [rows + 1] int32, 0 first, on the device.

    Where rows share prefixes, `keys` says what each row sees.
    """

    lengths: tuple[int, ...]
    starts: torch.Tensor
    keys: SharedKeys | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRows:
        """The places of rows that share nothing. Empty rows are left out."""
        filled = tuple(length for length in lengths if length)
        return cls(filled, _starts(filled).to(device))

    @classmethod
    def sharing(cls, lengths: Sequence[int], prefix_spans: Sequence[slice], device: torch.device) -> PackedRows:
        """The places of rows that see the tokens `prefix_spans` before their own `lengths`; none is empty."""
        rows = cls.of(lengths, device)
        if not any(span.stop for span in prefix_spans):
            return rows
        starts = _starts(lengths).tolist()
        own_spans = [slice(start, end) for start, end in pairwise(starts)]
        seen = list(zip(prefix_spans, own_spans, strict=True))
        key_lengths = [prefix.stop - prefix.start + own.stop - own.start for prefix, own in seen]
        index = torch.cat([torch.arange(span.start, span.stop) for span in chain.from_iterable(seen)])
        keys = SharedKeys(tuple(prefix_spans), max(key_lengths), _starts(key_lengths).to(device), index.to(device))
        return rows._replace(keys=keys)

    def attention_arguments(self) -> dict[str, Any]:
        """The arguments of an attention function: those of flash-attention by Hugging Face's names, and `row_lengths`
        and `shared_keys` for `varlen`.
        """
        longest = max(self.lengths)
        return {
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts if self.keys is None else self.keys.starts,
            "max_length_q": longest,
            "max_length_k": longest if self.keys is None else self.keys.longest,
            "row_lengths": self.lengths,
            "shared_keys": self.keys,
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


def selected_tokens(batch: TrainBatch) -> torch.Tensor:
    """[N] int64 flat positions of the loss mask's tokens; a row's first token has no prediction and is never one."""
    mask_T = batch.tokens["loss_mask"].clone()
    mask_T[(batch.lengths_B.cumsum(0) - batch.lengths_B)[batch.lengths_B > 0]] = False
    return mask_T.nonzero().squeeze(-1)


def trained_rollouts(batch: TrainBatch) -> list[list[int]]:
    """The rows that have a token to train on, by rollout, in order; a mini-batch is counted in these rollouts."""
    rows: dict[int, list[int]] = {}
    row_R = batch.row_of_token_T[selected_tokens(batch)].unique()
    for row, rollout in zip(row_R.tolist(), batch.rollout_B[row_R].tolist(), strict=True):
        rows.setdefault(rollout, []).append(row)
    return list(rows.values())


def model_input(batch: TrainBatch, device: torch.device, layout: Layout) -> ModelInput:
    """Tensors of one micro-batch: right-padded rows, or (packed) one row of all tokens with restarting positions.

    Right padding needs no attention mask: a causal model never looks to the right. An empty batch gives one token of
    which nothing is selected.
    """
    # A rank without rows runs the model as well: sharded models meet in every forward pass.
    if not len(batch.tokens["ids"]):
        one = torch.zeros(1, dtype=torch.int64)
        batch = TrainBatch(torch.ones_like(one), {"ids": one, "loss_mask": torch.zeros_like(one, dtype=torch.bool)})
    token_N = selected_tokens(batch)
    label_N = batch.tokens.get("labels", batch.tokens["ids"])[token_N]  # the ids whose log-probs are taken
    starts_B = batch.lengths_B.cumsum(0) - batch.lengths_B
    row_T = batch.row_of_token_T
    if layout.packed:
        position_T = torch.arange(len(row_T)) - starts_B[row_T]
        if layout.sequence is not None:
            return _slice(batch, position_T, token_N, label_N, device, layout.sequence)
        return _packed(batch, position_T, token_N, label_N, device, layout.prefixes(batch))
    # Selected are the places before the labels: the output there is what predicts them.
    ids_BL, row_N = batch.padded("ids"), row_T[token_N]
    select_N = row_N * ids_BL.shape[1] + (token_N - starts_B[row_N]) - 1
    return ModelInput(ids_BL.to(device), None, select_N.to(device), token_N, label_N.to(device))


def _packed(
    batch: TrainBatch,
    position_T: torch.Tensor,
    token_N: torch.Tensor,
    label_N: torch.Tensor,
    device: torch.device,
    prefixes: Prefixes,
) -> ModelInput:
    """One row of all tokens but prefixes that an earlier row has."""
    # Each row keeps the tokens that follow what it shares with an earlier row.
    shared_B = torch.tensor(prefixes.shared_lengths(range(len(batch))))
    kept_T = position_T >= shared_B[batch.row_of_token_T]
    own_B = batch.lengths_B - shared_B

    # Its attention also sees the prefix, where the first row that has it lies; rows without tokens are left out.
    starts_B = own_B.cumsum(0) - own_B
    found = zip(starts_B[list(prefixes.first)].tolist(), shared_B.tolist(), own_B.tolist(), strict=True)
    prefix_spans = [slice(start, start + length) if length else slice(0, 0) for start, length, own in found if own]
    rows = PackedRows.sharing(own_B[own_B > 0].tolist(), prefix_spans, device)

    # A selected token is predicted at the token before it, which is never in a shared prefix.
    select_N = (kept_T.cumsum(0) - 1)[token_N - 1]
    ids_1T, position_1T = (x_T[kept_T][None].to(device) for x_T in (batch.tokens["ids"], position_T))
    return ModelInput(ids_1T, position_1T, select_N.to(device), token_N, label_N.to(device), rows)


def _slice(
    batch: TrainBatch,
    position_T: torch.Tensor,
    token_N: torch.Tensor,
    label_N: torch.Tensor,
    device: torch.device,
    sequence: SequenceGroup,
) -> ModelInput:
    """This rank's slice of one row of all tokens."""
    filling = -len(position_T) % sequence.size  # a row of its own, which nobody else sees
    ids_T = functional.pad(batch.tokens["ids"], (0, filling))
    position_T = torch.cat([position_T, torch.arange(filling)])
    borders = torch.arange(sequence.size + 1) * (len(ids_T) // sequence.size)
    share = SequenceShare(sequence, tuple(torch.searchsorted(token_N - 1, borders).diff().tolist()))
    start, end = borders[sequence.place : sequence.place + 2].tolist()
    rows = PackedRows.of([*batch.lengths_B.tolist(), filling], device)
    ids_1T, position_1T = (x_T[None, start:end].to(device) for x_T in (ids_T, position_T))
    select_N = token_N[share.own] - 1 - start
    return ModelInput(ids_1T, position_1T, select_N.to(device), token_N, label_N.to(device), rows, share)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    """[len + 1] int32: where each of several runs begins, and the last ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


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


def values_of_own_rows(
    lengths_B: torch.Tensor, micro_batches: Sequence[Sequence[int]], tokens: Mapping[str, torch.Tensor]
) -> RankValues:
    """The part of the whole batch's `tokens` [T, ...] that belongs to the rows of this rank's micro-batches."""
    own = sorted(row for rows in micro_batches for row in rows)
    index_T = flat_positions(lengths_B, own)
    return RankValues(own, {name: value_T[index_T] for name, value_T in tokens.items()})
