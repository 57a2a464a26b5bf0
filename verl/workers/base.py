"""What every role's worker does: find the other ranks, take training steps, save and load its state."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar

import ray
import torch
from transformers import PreTrainedTokenizerBase

from verl.config import Config
from verl.engine.device.memory import MemoryMeter, device_memory, in_phase
from verl.engine.device.runtime import init_process_group, resolve_device
from verl.engine.trained import TrainedEngine
from verl.phases import Phase
from verl.process.determinism import seed_everything, use_deterministic_kernels
from verl.process.ranks import enter_working_dir
from verl.process.storage import Digests
from verl.process.watchdog import offer_stacks
from verl.single_controller.nodes import use_network_of
from verl.single_controller.shared_batch import SharedBatch
from verl.tracking.spans import Span, SpanRecorder

LOOPBACK = "127.0.0.1"  # on one node it works whatever happens to the network


class RankWorker:
    """The worker of one rank of a role. The ranks of a role have a process group of their own.

    Every method but `rendezvous` is called on all ranks at once; `start` creates the `engine`, and loads the
    `tokenizer` that is saved with its models.
    """

    engine: TrainedEngine
    tokenizer: PreTrainedTokenizerBase
    role: ClassVar[str]

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        enter_working_dir()
        offer_stacks()
        self.config = config
        self.rank, self.world_size = rank, world_size
        self.spans = SpanRecorder()

    def rendezvous(self) -> str:
        """Address of a free port on this worker's node, for `join`."""
        self._held_port = socket.socket()  # until it is collected, no one else gets the port; a store may share it
        self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held_port.bind(("", 0))
        port = self._held_port.getsockname()[1]
        host = ray.util.get_node_ip_address() if self._on_several_nodes else LOOPBACK
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def join(self, init_method: str) -> torch.device:
        """Meet the other ranks at `init_method`; returns this rank's device."""
        trainer = self.config.trainer
        seed_everything(trainer.seed + self.rank)
        if trainer.deterministic:
            use_deterministic_kernels()
        self.device = device = resolve_device(trainer.device)
        if self._on_several_nodes:
            use_network_of(ray.util.get_node_ip_address())
        init_process_group(self.rank, self.world_size, init_method, device, trainer.step_timeout_s)
        self.memory = MemoryMeter(device_memory(device), self.role, self.rank)
        return device

    @property
    def _on_several_nodes(self) -> bool:
        return self.config.trainer.nnodes > 1

    @in_phase(Phase.UPDATE)
    def update(self, batch: SharedBatch) -> dict[str, float]:
        """Train for one RL step; every rank returns the same metrics."""
        return self.engine.update(batch.fetch())

    def note_memory(self, phase: Phase) -> None:
        """Count the memory in use now for a phase in which other roles work."""
        with self.memory.during(phase):
            pass

    def memory_metrics(self) -> dict[str, float]:
        """This rank's memory metrics since the last call; see `MemoryMeter`."""
        return self.memory.metrics()

    def take_spans(self) -> list[Span]:
        """The spans of what this rank did since the last call."""
        return self.spans.take()

    def device_name(self) -> str:
        """Name of this rank's device, as its driver reports it; empty for a CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def load(self, path: str, of: str | None = None) -> None:
        """Replace the weights of a model (None: the trained one) by saved ones; its optimizer is reset."""
        self.engine.load_saved(Path(path), of)

    def save(self, path: str, of: str | None = None) -> None:
        """Write a model (None: the trained one) and the tokenizer in Hugging Face format to `path`."""
        self.engine.save_pretrained(Path(path), self.tokenizer, of)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate of all further steps."""
        self.engine.lr_factor *= factor

    def start_saving_state(self, folder: str) -> None:
        """Write what `load_state` needs to the folder, in the background."""
        self.engine.start_saving_state(Path(folder))

    def state_is_saved(self) -> bool:
        """Whether the background has finished, with or without an error."""
        return self.engine.resumable.done

    def saved_state(self) -> Digests:
        """Wait until all is written; returns what this rank wrote. Raises CheckpointError if that failed."""
        return self.engine.resumable.saved()

    def load_state(self, folder: str) -> None:
        """Resume exactly where `start_saving_state` was called."""
        self.engine.load_state(Path(folder))
