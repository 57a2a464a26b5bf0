"""What every role's worker does before it has a model: find the other ranks."""

from __future__ import annotations

import socket

import torch

from verl.config import Config
from verl.engine.device import init_process_group, resolve_device


class RankWorker:
    """One rank of a role. The ranks of a role have a process group of their own."""

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self.config = config
        self.rank, self.world_size = rank, world_size

    def rendezvous(self) -> str:
        """Address of a free port on this worker's node, for `join`."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host = "127.0.0.1" if self.config.trainer.nnodes == 1 else socket.gethostbyname(socket.gethostname())
        return f"tcp://{host}:{port}"

    def join(self, init_method: str) -> torch.device:
        """Meet the other ranks at `init_method`; returns this rank's device."""
        device = resolve_device(self.config.trainer.device)
        init_process_group(self.rank, self.world_size, init_method, device)
        return device
