"""Log-probs and entropies of a batch's tokens under one model, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from verl.engine.batching import flat_positions, model_input
from verl.engine.model import CausalModel
from verl.engine.reference_policy import ReferencePolicy
from verl.protocol import TrainBatch


@torch.no_grad()
def token_values(
    model: CausalModel | ReferencePolicy,
    batch: TrainBatch,
    micro_batches: Iterable[Sequence[int]],
    temperature: float,
    device: torch.device,
    packed: bool,
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
        inputs = model_input(batch.select(rows), device, packed)
        stats = model(inputs, temperature, top_k=top_k)
        token_N = flat_positions(batch.lengths_B, rows)[inputs.token_N]
        found["log_prob"][token_N] = stats.log_prob_N.float().cpu()
        found["entropy"][token_N] = stats.entropy_N.float().cpu()
        if top_k:
            index_Nk = stats.index_Nk.to("cpu", torch.int32)
            found.setdefault("top_index", index_Nk.new_zeros(num_tokens, index_Nk.shape[1]))[token_N] = index_Nk
    return found
