"""One queue of episodes for several engines: each takes the next ones when it has room; there are no rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.rollout.draws import Draws
from verl.single_controller import wait_for, wait_for_any


@dataclass
class Place:
    """An engine's worker, how many episodes it plays `at_once`, and how many it has."""

    worker: Any
    at_once: int
    held: int = 0

    @property
    def most(self) -> int:
        """A few more than it plays, so that it has the next one at hand while its answer is on the way."""
        return self.at_once + self.at_once // 8 + 1


class Stream:
    """Plays all of `draws` on the engines.

    An engine's call ends as soon as some of its episodes have, and the next call brings it new ones. While the queue
    is shorter than the room that there is, all engines are given equally much. Raises `Stalled` when an engine has
    finished nothing for `timeout_s` seconds, and what `Draws.record` and the episodes raise.
    """

    def __init__(self, places: Sequence[Place], draws: Draws, timeout_s: float) -> None:
        self.places, self.draws, self.timeout_s = places, draws, timeout_s
        self._calls: dict[Any, tuple[Place, float]] = {}  # with the time at which each was made

    def run(self) -> None:
        self.draws.put_back()
        for place in self.places:
            place.held = 0
        self._hand_out()
        while self._calls:
            oldest = min(made for _, made in self._calls.values())
            for call in wait_for_any(list(self._calls), "rollout", self.timeout_s, since=oldest):
                place, _ = self._calls.pop(call)
                [finished] = wait_for([call], "rollout", self.timeout_s)
                place.held -= len(finished)
                for slot, trajectory in finished:
                    self.draws.record(slot, trajectory)
            self._hand_out()

    def _hand_out(self) -> None:
        """A call for every engine that has none and has, or is given, something to play."""
        share = -(-(len(self.draws.waiting) + sum(place.held for place in self.places)) // len(self.places))
        busy = {id(place) for place, _ in self._calls.values()}
        for place in self.places:
            if id(place) in busy:
                continue
            new = self.draws.take(max(0, min(place.most, share) - place.held))
            place.held += len(new)
            if place.held:
                self._calls[place.worker.play.remote(new, self.draws.how)] = (place, time.monotonic())
