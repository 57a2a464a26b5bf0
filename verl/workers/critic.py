"""The critic role: the value model of a run whose advantages need one."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from verl.config import Config
from verl.engine.batching import RankValues
from verl.engine.resumable import Digests
from verl.engine.value_engine import ValueEngine
from verl.protocol import TrainBatch
from verl.workers.base import RankWorker


class CriticWorker(RankWorker):
    """One rank of the critic. Every method but `rendezvous` is called on all ranks at once."""

    def __init__(self, config: Config, total_training_steps: int, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self.total_training_steps = total_training_steps

    def start(self, init_method: str) -> None:
        """Meet the other ranks and load the model."""
        self.engine = ValueEngine(self.config, self.join(init_method), self.total_training_steps)
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.config.data.tokenizer or self.config.critic.model.tokenizer_path
        )

    def values(self, batch: TrainBatch) -> RankValues:
        """Values of this rank's rows."""
        return self.engine.values(batch)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One RL step; every rank returns the same metrics."""
        return self.engine.update(batch)

    def load(self, path: str) -> None:
        """Replace the weights by a saved critic's; the optimizer starts anew."""
        self.engine.load_saved(Path(path))

    def start_saving_state(self, folder: str) -> None:
        """Write what `load_state` needs to the folder, in the background."""
        self.engine.start_saving_state(Path(folder))

    def state_is_saved(self) -> bool:
        """Whether the background is done, well or not."""
        return self.engine.resumable.done

    def saved_state(self) -> Digests:
        """What this rank wrote, when it is written; raises CheckpointError if that failed."""
        return self.engine.resumable.saved()

    def load_state(self, folder: str) -> None:
        """Go on exactly where `start_saving_state` was called."""
        self.engine.load_state(Path(folder))

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate of all further steps."""
        self.engine.lr_factor *= factor

    def save(self, path: str) -> None:
        """Write the model and tokenizer in Hugging Face format to `path`."""
        self.engine.save_pretrained(Path(path), self.tokenizer)
