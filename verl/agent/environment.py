"""The two sides of an episode: what samples policy turns, and what answers them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from verl.config import Config
    from verl.protocol import Prompt


@dataclass(frozen=True)
class Sampling:
    """How one policy turn is sampled. `temperature` 0 means greedy; `max_tokens` is set per turn by the episode."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Generation:
    """One sampled turn, as sampled: stop strings and EOS are part of `ids`; `log_probs` are after temperature."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str  # "stop" (a stop string or EOS) or "length"


class Sampler(Protocol):
    """A language model that continues token ids."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation: ...


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler whose turns can be followed while they are sampled."""

    @property
    def num_running(self) -> int:
        """Requests that are being sampled, or wait for it."""
        ...

    def stream(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Generation, None]:
        """What `generate` gives, piece by piece; only the last piece has a `finish_reason` other than "".

        Closing it, or cancelling the task that waits for it, ends the sampling.
        """
        ...

    async def check(self) -> None:
        """Raise `RolloutError` when it cannot sample any more."""
        ...


def join_pieces(pieces: Sequence[Generation]) -> Generation:
    """The turn that a `StreamingSampler` gave in pieces."""
    ids = tuple(token for piece in pieces for token in piece.ids)
    return Generation(ids, tuple(x for piece in pieces for x in piece.log_probs), pieces[-1].finish_reason)


@dataclass(frozen=True)
class Outcome:
    """The environment's reply to one policy turn.

    `ids` are appended to the context (empty when `done`). `action` names what the turn was ("search", "answer",
    "invalid"), `valid` says whether it followed the grammar, `event` is kept in the trajectory for people to read.
    """

    action: str
    valid: bool
    done: bool
    ids: tuple[int, ...] = ()
    event: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """What answers the policy. One object serves all concurrent episodes, so it keeps no state of an episode."""

    stop_strings: tuple[str, ...]

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """Answer the policy's turn `text` (decoded for reading only).

        With `tools_allowed` false (the last turn), a tool call is not executed and gets no observation.
        Raises `EnvironmentUnavailable` when infrastructure fails: the episode then ends `failed`.
        """
        ...

    async def check(self) -> None:
        """Raise `EnvironmentUnavailable` (naming the address and the command that starts it) when not reachable."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class InspectedEnvironment(Environment, Protocol):
    """An environment that can say more of itself before a run."""

    tags: tuple[str, ...]  # what the policy has to write literally

    @classmethod
    def check_prompt_file(cls, config: Config, metadata: Mapping[str, str]) -> str | None:
        """What is wrong with a prompt file for this run, by the file's own `metadata`; None: nothing that is known."""
        ...

    async def probe(self, query: str) -> list[str] | None:
        """Use the tool once for real; returns the titles of what came back, best first, or None without a tool.

        Raises `EnvironmentUnavailable`.
        """
        ...
