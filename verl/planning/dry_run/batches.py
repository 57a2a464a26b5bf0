"""Batches as large as the settings allow: every row at its limit, every token trained.

A step has many such micro-batches; two of them take as much memory as all, because what remains of one (the gradients)
is the same after the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from verl.config import Config
from verl.config.rules.predicates import needs_ref_log_probs, scores_in_update
from verl.protocol import TrainBatch

MICRO_BATCHES = 2
DIFFERENT_IDS = 100


@dataclass(frozen=True)
class Limit:
    """How much one pass of a rank may hold: `tokens`, or `rows` over all ranks.

    If ranks share rows, a group of them counts as one rank.
    """

    by_tokens: bool
    tokens: int
    rows: int

    def of_ranks(self, number: int) -> Limit:
        """The limit of a group of `number` ranks."""
        return replace(self, tokens=self.tokens * number)

    def row_lengths(self, window: int, num_ranks: int, most_rows: int) -> list[int]:
        """Row lengths of the largest micro-batch of one rank (or group) with at most `most_rows` rows."""
        if not self.by_tokens:
            return [window] * min(max(1, self.rows // num_ranks), most_rows)
        full, rest = divmod(self.tokens, window)
        if full == 0:
            return [window]  # a row that is longer than the budget goes alone
        lengths = [window] * full + ([rest] if rest > 1 else [])
        return lengths[:most_rows]


def limit_of(settings: object, prefix: str) -> Limit:
    """From the settings of a pass, whose names begin with `prefix`."""
    values = vars(settings)
    by_tokens = values.get(f"{prefix}_use_dynamic_bsz", values.get("use_dynamic_bsz"))
    return Limit(bool(by_tokens), values[f"{prefix}_max_token_len_per_gpu"], values[f"{prefix}_micro_batch_size"])


def largest_batch(lengths: list[int], num_ranks: int, micro_batches: int, top_k: int, batch_std: bool) -> TrainBatch:
    """A batch with all columns that any loss reads, for `micro_batches` on each rank."""
    lengths_B = torch.tensor(lengths * (num_ranks * micro_batches), dtype=torch.int64)
    num_tokens, num_rows = int(lengths_B.sum()), len(lengths_B)
    zero_T = torch.zeros(num_tokens)
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")
    tokens = {name: zero_T for name in names}
    ids_T = torch.arange(num_tokens) % DIFFERENT_IDS  # one id alone would make a GPU add all of a gradient to one row
    tokens |= {"ids": ids_T, "loss_mask": torch.ones(num_tokens, dtype=torch.bool)}
    if top_k:
        tokens["top_index"] = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    rows = {"reward": torch.zeros(num_rows), "group": torch.arange(num_rows)}
    if batch_std:
        rows["adv_batch_std"] = torch.ones(num_rows)
    return TrainBatch(lengths_B, tokens, rows)


def for_update(batch: TrainBatch, config: Config) -> TrainBatch:
    """The batch without the columns that the actor's update computes itself."""
    found = set() if needs_ref_log_probs(config) else {"ref_log_probs"}
    if scores_in_update(config):
        found |= (
            {"top_index"} if config.actor_rollout_ref.actor.use_rollout_log_probs else {"top_index", "old_log_probs"}
        )
    return replace(batch, tokens={name: value_T for name, value_T in batch.tokens.items() if name not in found})
