"""What every trained engine has, whatever it trains: its place in the run, and a state to go on from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from verl.engine.learner import Learner
from verl.engine.optimizer import Schedule, set_lr
from verl.engine.residence import Residence
from verl.engine.resumable import Resumable
from verl.heap import return_free_memory
from verl.protocol import TrainBatch


class TrainedEngine(ABC):
    """Counts the RL steps. All methods are collective: every rank calls them in the same order.

    Between its methods what can be in host memory is there (`residence`).
    """

    def __init__(self, schedule: Schedule, learner: Learner, resumable: Resumable, residence: Residence) -> None:
        self.schedule = schedule
        self.learner = learner
        self.resumable = resumable
        self.residence = residence
        self.step = 0  # RL steps done
        self.lr_factor = 1.0  # on top of the schedule
        residence.leave()

    @abstractmethod
    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One RL step; every rank returns the same metrics."""

    def set_lr_of_step(self) -> float:
        """Give the optimizer the learning rate of this RL step, and return it."""
        lr = self.schedule.at(self.step) * self.lr_factor
        set_lr(self.learner.optimizer, lr)
        return lr

    def end_step(self) -> None:
        """Count an RL step, and give back the memory that only it needed."""
        self.step += 1
        return_free_memory()

    def start_saving_state(self, folder: Path) -> None:
        """Write all that `load_state` needs to the folder, in the background; see `Resumable`."""
        self.resumable.start_saving(folder, {"step": self.step, "lr_factor": self.lr_factor})

    def load_state(self, folder: Path) -> None:
        """Go on exactly where `start_saving_state` was called. Raises CheckpointError."""
        counters = self.resumable.load(folder, {"step": 0, "lr_factor": 0})
        self.step, self.lr_factor = int(counters["step"]), counters["lr_factor"]
        self.residence.leave()
