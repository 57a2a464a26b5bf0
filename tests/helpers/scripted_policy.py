"""A policy that says by heart what it is given."""

from __future__ import annotations

from collections.abc import Sequence

from verl.agent.environment import Generation, Sampling


class Script:
    """Says its turns, which are token ids, one after the other, each cut off at its limit, and then nothing more."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns = list(turns)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        said = tuple(self.turns.pop(0) if self.turns else ())
        turn = said[: sampling.max_tokens]
        return Generation(turn, (-1.0,) * len(turn), "stop" if turn == said else "length")
