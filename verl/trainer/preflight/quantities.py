"""What every estimate starts from: the place, the trajectories of a step, and their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import Config

GIB = 2**30
FLOAT32 = 4


@dataclass(frozen=True)
class Place:
    """Where a run is estimated: workers, bytes of one device, and whether it is a GPU."""

    workers: int
    device_bytes: int
    on_gpu: bool

    @property
    def value_bytes(self) -> int:
        """Of the forward pass."""
        return 2 if self.on_gpu else FLOAT32


def window_of(config: Config) -> int:
    """No sequence is longer, in tokens."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def in_words(num_bytes: float) -> str:
    """In GiB, or in MiB where that says more."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def count_in_words(number: int) -> str:
    """In billions, or in millions where that says more."""
    return f"{number / 1e9:.1f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"
