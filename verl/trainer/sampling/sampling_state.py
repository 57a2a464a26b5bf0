"""The state that decides which prompts are drawn next and how they are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl.process.determinism import random_state, set_random_state


class Prompts(Protocol):
    """What prompts are drawn from."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class SamplingState:
    """The position in `prompts`, and the generators that rewards and environments share, each [n] uint8."""

    prompts: dict[str, Any]
    random: dict[str, torch.Tensor]

    @classmethod
    def now(cls, prompts: Prompts) -> SamplingState:
        return cls(prompts.state_dict(), random_state())

    def to_json(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "random": {name: state.numpy().tobytes().hex() for name, state in self.random.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SamplingState:
        drawn = {name: bytearray.fromhex(state) for name, state in saved.get("random", {}).items()}
        return cls(
            saved["prompts"], {name: torch.frombuffer(state, dtype=torch.uint8) for name, state in drawn.items()}
        )

    def put_back(self, prompts: Prompts) -> None:
        """Restore it. Raises DataError if `prompts` are not those of the state."""
        prompts.load_state_dict(self.prompts)
        set_random_state(self.random)
