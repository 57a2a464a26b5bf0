"""One queue of episodes for several engines: each takes the next ones when it has room; there are no rounds."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from verl.errors import EngineDied, SamplingAbandoned, WorkerDied
from verl.rollout.draws import Draws
from verl.rollout.fleet import SHUTDOWN_S, Engine, Fleet
from verl.single_controller import wait_for, wait_for_any

NOTICE_S = TELL_AGAIN_S = 1.0


@dataclass
class Place:
    """An engine, and the slots of the episodes that it has."""

    engine: Engine
    held: set[int] = field(default_factory=set)

    @property
    def most(self) -> int:
        """A few more than it plays, so that it has the next one at hand while its answer is on the way."""
        return self.engine.at_once + self.engine.at_once // 8 + 1


class Stream:
    """Plays all of `draws` on the engines, or until these are enough: then what is being played is interrupted.

    An engine's call ends as soon as some of its episodes have, and the next call brings it new ones. While the queue
    is shorter than the room that there is, all engines are given equally much. The episodes of an engine that dies
    go to the others. Raises `EngineDied` when none is left, `Stalled` when an engine has finished nothing for
    `timeout_s` seconds, `SamplingAbandoned` soon after `abandoned` is set and the engines have been told to end their
    episodes, and what `Draws.record` and the episodes raise.
    """

    def __init__(self, fleet: Fleet, draws: Draws, timeout_s: float, abandoned: threading.Event) -> None:
        self.fleet, self.draws, self.timeout_s, self.abandoned = fleet, draws, timeout_s, abandoned
        self.places = [Place(engine) for engine in fleet.engines]
        self._calls: dict[Any, tuple[Place, float]] = {}  # with the time at which each was made
        self._interrupts: set[Any] = set()  # those of the calls that interrupt

    def run(self) -> None:
        self._require_wanted()
        self.draws.put_back()
        self.draws.settle()
        if not self.draws.is_enough:
            self._hand_out()
        while self._calls:
            self._take_in()
            if not self.draws.is_enough:
                self.draws.settle()
            if self.draws.is_enough:
                self._interrupt()
            else:
                self._hand_out()

    def abandon(self) -> None:
        """End what the engines are playing, and wait for it, at most SHUTDOWN_S seconds.

        They are told again until no call is left: Ray may begin a `play` after an `abandon` that was sent later, and
        its episodes would reach the next stream, which has other slots.
        """
        left, give_up = set(self._calls), time.monotonic() + SHUTDOWN_S
        while True:
            told = [engine.worker.abandon.remote() for engine in self.fleet.engines]
            _, missing = ray.wait([*left, *told], num_returns=len(left) + len(told), timeout=TELL_AGAIN_S)
            left &= set(missing)
            if not missing or time.monotonic() > give_up:
                return

    def _take_in(self) -> None:
        """Wait until some of the calls have ended, and record what they bring."""
        calls, oldest = list(self._calls), min(made for _, made in self._calls.values())
        while not ray.wait(calls, timeout=NOTICE_S)[0] and time.monotonic() < oldest + self.timeout_s:
            self._require_wanted()
        done = wait_for_any(calls, "rollout", self.timeout_s, since=oldest)
        self._require_wanted()
        for call in done:
            place, _ = self._calls.pop(call)
            self._interrupts.discard(call)
            try:
                [finished] = wait_for([call], "rollout", self.timeout_s)
            except (EngineDied, WorkerDied) as error:
                self._lose(place, error)
                continue
            for slot, trajectory in finished:
                place.held.remove(slot)
                self.draws.record(slot, trajectory, place.engine.name)

    def _interrupt(self) -> None:
        """Call for what the engines still hold, besides the calls that are under way.

        Until it has come: Ray may begin a `play` after an `interrupt` that was sent later.
        """
        asked = {id(self._calls[call][0]) for call in self._interrupts}
        for place in self.places:
            if place.held and id(place) not in asked:
                call = place.engine.worker.interrupt.remote()
                self._calls[call] = (place, time.monotonic())
                self._interrupts.add(call)

    def _require_wanted(self) -> None:
        if self.abandoned.is_set():
            raise SamplingAbandoned(f"step {self.draws.step}: sampling was abandoned")

    def _lose(self, place: Place, error: EngineDied | WorkerDied) -> None:
        self.fleet.lose(place.engine, error)
        if place not in self.places:  # it owed two answers
            return
        self.places.remove(place)
        self.draws.return_first(place.held)
        if not (self.places or self.draws.is_enough):
            raise EngineDied(str(error)) from error

    def _hand_out(self) -> None:
        """A call for every engine that has none and has, or is given, something to play."""
        share = -(-(len(self.draws.waiting) + sum(len(place.held) for place in self.places)) // len(self.places))
        busy = {id(place) for place, _ in self._calls.values()}
        for place in self.places:
            if id(place) in busy:
                continue
            new = self.draws.take(max(0, min(place.most, share) - len(place.held)), place.engine.name)
            place.held |= {request.slot for request in new}
            if place.held:
                self._calls[place.engine.worker.play.remote(new)] = (place, time.monotonic())
