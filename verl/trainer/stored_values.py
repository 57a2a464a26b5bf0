"""What the step knew of each token, for the stored trajectories."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from verl.protocol import TrainBatch
from verl.tracking.token_columns import TokenValues
from verl.trainer.collection import Collected


def token_values(collected: Collected, trained: TrainBatch, scored: TrainBatch) -> TokenValues:
    """Of the trajectories that were trained on, by their place in `collected.sampled`.

    `trained` is the batch that the losses saw; `scored` has `old_log_probs` where the trainer found them
    (`Updates.scored`). `kl` is there with a KL in the reward, or as the update found it, where one is in the loss.
    """
    batch = collected.batch
    place = {id(trajectory): row for row, trajectory in enumerate(collected.sampled)}
    mask_T = batch.tokens["loss_mask"]
    found = {"advantages": (batch.tokens["advantages"], mask_T)}
    if "old_log_probs" in scored.tokens:
        found["old_log_probs"] = (scored.tokens["old_log_probs"], scored.tokens.get("scored", mask_T))
    if "kl" in trained.tokens:
        in_reward = "kl" in batch.tokens
        found["kl"] = (trained.tokens["kl"], mask_T if in_reward else trained.tokens["loss_mask"])
    return TokenValues(
        [place[id(trajectory)] for trajectory in collected.trained],
        batch.lengths_B.numpy(),
        {name: (_array(value_T), _array(known_T.bool())) for name, (value_T, known_T) in found.items()},
    )


def _array(value_T: torch.Tensor) -> npt.NDArray[Any]:
    return value_T.detach().cpu().numpy()
