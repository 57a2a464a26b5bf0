"""What every trained engine has, whatever it trains: passes that read, updates, saving, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from verl.config import ActorConfig, Config, CriticConfig, FsdpConfig
from verl.config.sections.model import FrozenFsdpConfig
from verl.engine.batching import Layout, RankValues, trained_rollouts, values_of_own_rows
from verl.engine.device.residence import residence
from verl.engine.device.sharding import reshard
from verl.engine.files.resumable import Resumable
from verl.engine.files.saving import load_saved, save_model
from verl.engine.learner import Learner, LossFunction, Schedule, TokenWeights, build_adamw, set_lr, token_mean
from verl.engine.micro_batches import Budget, micro_budget, mini_batches, plan
from verl.engine.model import Decoder
from verl.engine.token_values import ReadTokens, read_tokens
from verl.errors import NumericalError
from verl.phases import Part, Phase
from verl.process.startup import RETURN_EVERY_S, keep_freed_memory, return_free_memory
from verl.protocol import TrainBatch


class TrainedEngine(ABC):
    """A model with its optimizer, sharded over all ranks of the process group. One object per rank, no Ray.

    Each rank gets the same whole batch in every call and works on its own rows. All methods are collective: every
    rank calls them in the same order. Between them what can be in host memory is there (`residence`).
    """

    trained: ClassVar[str]  # the name of the trained one of `models`
    device: torch.device

    def __init__(
        self,
        config: Config,
        settings: ActorConfig | CriticConfig,
        fsdp: FsdpConfig,
        models: Mapping[str, Decoder],
        layout: Layout,
        total_training_steps: int,
        *,
        weigh: TokenWeights = token_mean,
        frozen: FrozenFsdpConfig | None = None,
        failures: str = "failures",
    ) -> None:
        """A subclass sets `device` and loads `models`, by the names that a saved state gives them: the trained one, and
        perhaps a frozen "anchor", off-loaded as `frozen` says. `total_training_steps` is the length of the
        learning-rate schedule unless optim.total_training_steps says otherwise.
        """
        keep_freed_memory()

        # The trained model, its optimizer, and how it learns.
        self.config, self.settings, self.models, self.layout = config, settings, models, layout
        self.model = models[self.trained]
        optimizer = build_adamw(self.model.parameters(), settings.optim)
        self.learner = Learner(
            self.model,
            optimizer,
            self.device,
            self.budget(settings.use_dynamic_bsz, settings.ppo_max_token_len_per_gpu, settings.ppo_micro_batch_size),
            settings.grad_clip,
            Path(config.trainer.default_local_dir) / failures,
            layout,
            fsdp.reduce_gradients,
            weigh,
        )
        self.schedule = Schedule.from_config(settings.optim, total_training_steps)

        # The state to resume from, and what of it is on the device in which phase; at rest, as little as possible.
        self.resumable = Resumable(models, self.trained, optimizer)
        anchor = (frozen, models["anchor"]) if frozen is not None and "anchor" in models else None
        self.residence = residence(fsdp, self.model, optimizer, self.device, anchor)
        self.step = 0  # RL steps done
        self.lr_factor = 1.0  # on top of the schedule
        self.residence.leave()

    @abstractmethod
    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train for one RL step: `ppo_epochs` passes over mini-batches of `ppo_mini_batch_size` rollouts, an AdamW step
        for each. Every rank returns the same metrics.
        """

    def budget(self, by_tokens: bool, max_tokens: int, micro_batch_size: int) -> Budget:
        """The budget of one pass on the ranks that share it."""
        return micro_budget(by_tokens, max_tokens, micro_batch_size, self.layout.ranks_per_row)

    def mini_batches(self, batch: TrainBatch) -> list[list[int]]:
        """The rows of each mini-batch of this RL step: those of whole rollouts."""
        settings, seed = self.settings, self.config.trainer.seed
        rollouts, size = trained_rollouts(batch), settings.ppo_mini_batch_size
        cut = mini_batches(range(len(rollouts)), size, settings.ppo_epochs, settings.shuffle, seed, self.step)
        return [[row for rollout in part for row in rollouts[rollout]] for part in cut]

    def read(
        self, batch: TrainBatch, budget: Budget, part: Part, read: ReadTokens, release: Callable[[], None], what: str
    ) -> RankValues:
        """The values that `read` returns for the loss mask's tokens in this rank's rows, without gradients. `part` is
        what it needs on the device, `release` lets go of it. Raises NumericalError, which names `what`, for a value
        that is not finite.
        """
        place, prefixes = (dist.get_world_size(), dist.get_rank()), self.layout.prefixes(batch)
        micro_batches = plan(batch.lengths_B, *place, budget, self.layout, prefixes)
        with self.residence.during(Phase.SCORE, part):
            values = read_tokens(batch, micro_batches, self.device, self.layout, read)
            release()
        if not all(value_T.isfinite().all() for value_T in values.values()):
            raise NumericalError(f"step {self.step + 1}: {what} are not finite; its weights have diverged")
        return values_of_own_rows(batch.lengths_B, micro_batches, values)

    def take_steps(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        loss: Callable[[int], LossFunction],
        on_device: Sequence[Part] = (),
    ) -> tuple[list[dict[str, float]], float]:
        """An optimizer step for each of `parts` that has a token to train, with the `loss` of its number; ends the RL
        step. Returns the metrics of each optimizer step, and the learning rate.
        """
        lr = self.schedule.at(self.step) * self.lr_factor
        set_lr(self.learner.optimizer, lr)
        with self.residence.during(Phase.UPDATE, *on_device):
            learn, step = self.learner.learn, self.step + 1
            steps = [learn(batch.select(rows), loss(number), step) for number, rows in enumerate(parts)]
            self.release()
        self.step += 1
        return_free_memory(RETURN_EVERY_S)
        return [metrics for metrics in steps if metrics], lr

    def release(self) -> None:
        """Let go of all gathered weights."""
        reshard(self.model)

    def load_saved(self, path: Path, of: str | None = None) -> None:
        """Replace the weights of a model, by default the trained one, by saved ones. The optimizer of the trained one
        is reset. Raises CheckpointError.
        """
        load_saved(self.own_weights(of), path)
        if of in (None, self.trained):
            self.learner.optimizer.state.clear()

    def save_pretrained(self, path: str | Path, tokenizer: Any, of: str | None = None) -> None:
        """Save a model in Hugging Face format, usable as `model.path`. Raises CheckpointError on every rank."""
        save_model(self.own_weights(of), Path(path), tokenizer)

    def own_weights(self, of: str | None) -> Decoder:
        """A model by its name; None: the trained one. Raises ValueError for one that has no weights of its own."""
        return self.models[of or self.trained]

    def start_saving_state(self, folder: Path) -> None:
        """Write all that `load_state` needs to the folder, in the background; see `Resumable`."""
        self.resumable.start_saving(folder, {"step": self.step, "lr_factor": self.lr_factor})

    def load_state(self, folder: Path) -> None:
        """Resume exactly where `start_saving_state` was called. Raises CheckpointError."""
        # Moments are made where the parameters are: on the device, unless they are off-loaded themselves.
        at_rest = self.residence.moves(Part.OPTIMIZER)
        with nullcontext() if at_rest else self.residence.during(Phase.UPDATE, Part.PARAMETERS):
            counters = self.resumable.load(folder, {"step": 0, "lr_factor": 0})
        self.step, self.lr_factor = int(counters["step"]), counters["lr_factor"]
        self.residence.leave()
