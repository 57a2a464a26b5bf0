"""The critic role: the value model of a run whose advantages need one."""

from __future__ import annotations

from verl.config import Config
from verl.engine.device.memory import in_phase
from verl.engine.value_engine import ValueEngine
from verl.phases import Phase
from verl.pretrained import load_critic_tokenizer
from verl.single_controller.shared_batch import SharedBatch, SharedValues
from verl.workers.base import RankWorker


class CriticWorker(RankWorker):
    """One rank of the critic."""

    engine: ValueEngine
    role = "critic"

    def __init__(self, config: Config, total_training_steps: int, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self.total_training_steps = total_training_steps

    def start(self, init_method: str) -> None:
        """Meet the other ranks and load the model."""
        device = self.join(init_method)
        with self.memory.explaining("while the model is loaded"):
            self.engine = ValueEngine(self.config, device, self.total_training_steps)
        self.tokenizer = load_critic_tokenizer(self.config)

    @in_phase(Phase.SCORE)
    def values(self, batch: SharedBatch) -> SharedValues:
        """Values of this rank's rows."""
        return SharedValues.of(self.engine.values(batch.fetch()))
