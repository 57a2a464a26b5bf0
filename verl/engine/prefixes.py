"""Prompts that several rows begin with. A causal model computes the same for all of them, so once is enough.

The samples of one prompt (GRPO's group) have the prompt in common. In a packed micro-batch its first row is complete;
the others leave the prompt out, and their attention reads the keys and values of the first row's prompt. The result and
the gradient are those of complete rows: what the prompt's gradient is summed over changes its order only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verl.protocol import TrainBatch


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each row: the first row of the batch that has the same one (`first`), and its length in tokens.

    The prefix ends before the token that predicts the row's first selected one, so every row keeps a token of its own
    and no selected token is predicted in a prefix.
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
        ids_T, seen = batch.tokens["ids"].numpy(), dict[bytes, int]()
        first = [
            seen.setdefault(ids_T[start : start + length].tobytes(), row)
            for row, (start, length) in enumerate(zip(starts_B.tolist(), lengths, strict=True))
        ]
        return cls(first, lengths)

    @property
    def any(self) -> bool:
        """Whether two rows have a prefix in common."""
        return any(self.shared_lengths(range(len(self.lengths))))

    def select(self, rows: Sequence[int]) -> Prefixes:
        """The prefixes of a batch of the given rows, in the given order."""
        numbers: dict[int, int] = {}
        first = [numbers.setdefault(self.first[row], number) for number, row in enumerate(rows)]
        return Prefixes(first, [self.lengths[row] for row in rows])

    def shared_lengths(self, rows: Sequence[int]) -> list[int]:
        """The length of each row's prefix if one of `rows` before it has the same; else 0."""
        seen: set[int] = set()
        lengths = []
        for row in rows:
            lengths.append(self.lengths[row] if self.first[row] in seen else 0)
            seen.add(self.first[row])
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
