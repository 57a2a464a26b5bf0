"""Log-probs of stored ids under another checkpoint, teacher-forced, compared with those of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from long_task import track
from search_r1.replay.rescoring import Stored
from verl.algorithms.kl import SAMPLED_KL
from verl.engine.device.runtime import resolve_device, resolve_head_dtype, resolve_precision
from verl.engine.device.sharding import num_parameters
from verl.engine.micro_batches import Budget, plan
from verl.engine.model import CausalLm, CausalModel, layout_of
from verl.engine.token_values import policy_scores, read_tokens
from verl.errors import DataError, NumericalError
from verl.protocol import TrainBatch, Trajectory, flat_tokens


@dataclass(frozen=True)
class Difference:
    """Over policy tokens: `mean` and `max_abs` of checkpoint minus sampler, and `kl` (k3) in nats per token.

    The tokens were drawn by the sampler, so `kl` estimates KL(sampler || checkpoint).
    """

    num_tokens: int
    mean: float
    max_abs: float
    kl: float


class Checkpoint:
    """A causal language model that scores trajectories. `dtype` "auto" chooses as a training's param_dtype does."""

    def __init__(self, path: str, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False) -> None:
        """Raises ConfigError if there is no usable model at `path`, or no such device or dtype."""
        self.path = path
        self.device = resolve_device(device)
        hf_model = CausalLm(path, self.device, trust_remote_code=trust_remote_code).whole()
        precision = resolve_precision(self.device, dtype, "float32", num_parameters(hf_model))
        self.vocabulary = hf_model.get_input_embeddings().weight.shape[0]
        self.layout = layout_of([hf_model], remove_padding=True)
        head_dtype = resolve_head_dtype("auto", precision)
        self.model = CausalModel(hf_model, None, head_dtype).to(self.device, precision.param_dtype)

    def log_probs(self, stored: Stored, temperature: float, max_tokens: int) -> list[list[float]]:
        """For each trajectory one number per id: at a policy token its float32 log-prob, else 0.

        A token is predicted from those before it in its sequence (`Trajectory.sequences`). Logits are divided by
        `temperature` first. A forward pass has at most `max_tokens` tokens, or one sequence.
        Raises DataError for ids outside the vocabulary and NumericalError for log-probs that are not finite.
        """
        self._check_vocabulary(stored)
        # Ids and mask alone: a failed trajectory has no reward, but ids that were sampled.
        flat = flat_tokens(stored.trajectories)
        tokens = {"ids": torch.from_numpy(flat.ids_T), "loss_mask": torch.from_numpy(flat.loss_mask_T)}
        batch = TrainBatch(torch.from_numpy(flat.lengths_B), tokens)
        parts = plan(batch.lengths_B, 1, 0, Budget(tokens=max_tokens), self.layout)
        told = track(parts, "log_probs", len(parts), "batches")
        scores = policy_scores(self.model, temperature)
        log_prob_T = read_tokens(batch, told, self.device, self.layout, scores)["log_prob"]
        if not log_prob_T.isfinite().all():
            raise NumericalError(f"log-probs under {self.path} are not finite; its weights are damaged")
        return [value_L.tolist() for value_L in log_prob_T.split([one.num_tokens for one in stored.trajectories])]

    def _check_vocabulary(self, stored: Stored) -> None:
        for trajectory, place in zip(stored.trajectories, stored.places, strict=True):
            largest = max(trajectory.ids, default=0)
            if largest >= self.vocabulary:
                raise DataError(f"{place}: id {largest} is none of the {self.vocabulary} that {self.path} knows")


def difference(trajectories: Sequence[Trajectory], log_probs: Sequence[Sequence[float]]) -> Difference:
    """The difference between a checkpoint's `log_probs` and the stored ones. Raises DataError without policy tokens."""
    mask_T = torch.tensor([policy for t in trajectories for policy in t.loss_mask], dtype=torch.bool)
    sampler_N = torch.tensor([value for t in trajectories for value in t.log_probs], dtype=torch.float64)[mask_T]
    other_N = torch.tensor([value for row in log_probs for value in row], dtype=torch.float64)[mask_T]
    if not len(sampler_N):
        raise DataError("the trajectories have no policy tokens; there is nothing to compare")
    difference_N = other_N - sampler_N
    kl_N = SAMPLED_KL["k3"](sampler_N, other_N)
    return Difference(len(sampler_N), float(difference_N.mean()), float(difference_N.abs().max()), float(kl_N.mean()))
