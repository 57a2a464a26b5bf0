"""The trajectory files of a run, with the values that a step computed for each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from verl.config import Config
from verl.protocol import TrainBatch, Trajectory
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.trajectory_columns import Decode, TokenValues
from verl.tracking.trajectory_store import Kind, write_trajectories
from verl.trainer.metrics.health import PolicyScores
from verl.trainer.sampling.collection import Collected


class TrajectoryFiles:
    """The trajectory files of a run, if trainer.save_trajectories is set: written during the next step, by the writer's
    thread, which also decodes.
    """

    def __init__(self, config: Config, run_dir: Path, writer: BackgroundWriter, decode: Decode) -> None:
        self.enabled, self.run_dir = config.trainer.save_trajectories, run_dir
        self.writer, self.decode = writer, decode

    def write(
        self, trajectories: Sequence[Trajectory], split: Kind, step: int, values: TokenValues | None = None
    ) -> None:
        """Queue the files. Raises what an earlier write raised."""
        if self.enabled:
            what = (split, step, trajectories, self.decode, values)
            self.writer.hand_over(partial(write_trajectories, self.run_dir, *what))


def token_values(collected: Collected, trained: TrainBatch, scores: PolicyScores) -> TokenValues:
    """The token values of the trajectories that were trained on, by their position in `collected.sampled`.

    `trained`: the batch that the losses saw. `kl` is included with a KL in the reward, or, as the update computed it,
    with one in the loss.
    """
    batch = collected.batch
    # The files have everything that was sampled, but the batch only what was trained on.
    place = {id(trajectory): row for row, trajectory in enumerate(collected.sampled)}
    mask_T = batch.tokens["loss_mask"]
    # Each value, with the mask of the tokens for which it is known.
    found = {"advantages": (batch.tokens["advantages"], mask_T)}
    if scores.log_prob_T is not None:
        found["old_log_probs"] = (scores.log_prob_T, scores.known_T)
    if "kl" in trained.tokens:
        in_reward = "kl" in batch.tokens
        found["kl"] = (trained.tokens["kl"], mask_T if in_reward else trained.tokens["loss_mask"])
    return TokenValues(
        [place[id(trajectory)] for trajectory in collected.trained],
        batch.rollout_of_token_T.bincount(minlength=len(collected.trained)).numpy(),
        {name: (_array(value_T), _array(known_T.bool())) for name, (value_T, known_T) in found.items()},
    )


def _array(value_T: torch.Tensor) -> npt.NDArray[Any]:
    return value_T.detach().cpu().numpy()
