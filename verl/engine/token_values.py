"""Log-probs and entropies of a batch's tokens under one model, micro-batch by micro-batch: of passes without a gradient
(`token_values`), and of an update's own (`TokenScores`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from verl.engine.batching import Layout, ModelInput, RankValues, flat_positions, model_input
from verl.engine.model import CausalModel
from verl.engine.reference_policy import ReferencePolicy
from verl.protocol import TrainBatch

POLICY_SCORES = ("log_prob", "entropy")


@torch.no_grad()
def token_values(
    model: CausalModel | ReferencePolicy,
    batch: TrainBatch,
    micro_batches: Iterable[Sequence[int]],
    temperature: float,
    device: torch.device,
    layout: Layout,
    top_k: int = 0,
) -> dict[str, torch.Tensor]:
    """`log_prob` and `entropy` [T] float32 on the CPU at the loss mask's tokens of `micro_batches`, 0 elsewhere.

    `micro_batches` are lists of row numbers, as `batching.plan` gives them. Logits are divided by
    `temperature` first. `top_k` adds `top_index` [T, k] int32: the most likely ids at each of these tokens.
    """
    model.eval()
    num_tokens = len(batch.tokens["ids"])
    found = {name: torch.zeros(num_tokens) for name in ("log_prob", "entropy")}
    for rows in micro_batches:
        inputs = model_input(batch.select(rows), device, layout)
        stats = model(inputs, temperature, top_k=top_k)
        token_N = flat_positions(batch.lengths_B, rows)[inputs.token_N]
        found["log_prob"][token_N] = stats.log_prob_N.float().cpu()
        found["entropy"][token_N] = stats.entropy_N.float().cpu()
        if top_k:
            index_Nk = stats.index_Nk.to("cpu", torch.int32)
            found.setdefault("top_index", index_Nk.new_zeros(num_tokens, index_Nk.shape[1]))[token_N] = index_Nk
    return found


class TokenScores:
    """What the forward passes of an update found, token by token. It stays on the device until `of_rank`: a copy to the
    host would wait for the device in every micro-batch.
    """

    def __init__(self, lengths_B: torch.Tensor, names: Sequence[str]) -> None:
        self.lengths_B, self.names = lengths_B, names
        self._parts: list[tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]] = []

    def add(self, rows: list[int], inputs: ModelInput, scores: dict[str, torch.Tensor]) -> None:
        """Of the selected tokens [N] of a micro-batch, which has these `rows` of the batch."""
        self._parts.append((rows, inputs.token_N, {name: scores[name] for name in self.names}))

    def of_rank(self) -> RankValues:
        """`names` [T] float32 of the rows that were added."""
        found = {name: torch.zeros(int(self.lengths_B.sum())) for name in self.names}
        for rows, token_N, scores in self._parts:
            index_N = flat_positions(self.lengths_B, rows)[token_N]
            for name, value_T in found.items():
                value_T[index_N] = scores[name].float().cpu()
        own = sorted(row for rows, _, _ in self._parts for row in rows)
        index_T = flat_positions(self.lengths_B, own)
        return RankValues(own, {name: value_T[index_T] for name, value_T in found.items()})
