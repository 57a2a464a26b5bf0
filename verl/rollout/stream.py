"""One queue of episodes for all engines: each takes the next ones when it has room, without synchronized rounds."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from verl.errors import EngineDied, SamplingAbandoned, WorkerDied
from verl.rollout.episode_queue import EpisodeQueue
from verl.rollout.fleet import SHUTDOWN_S, Engine, Fleet
from verl.single_controller import wait_for, wait_for_any

NOTICE_S = 0.2
SEND_AGAIN_S = 1.0


@dataclass
class Assignment:
    """The episodes that an engine has, by their slots."""

    engine: Engine
    held: set[int] = field(default_factory=set)

    @property
    def most(self) -> int:
        """The most episodes that it gets: a few more than it runs at once, so that it has the next one while its answer
        is on the way.
        """
        return self.engine.at_once + self.engine.at_once // 8 + 1


class Stream:
    """Runs all episodes of `queue` on the engines, or until there are enough: then running ones are interrupted.

    A call to an engine returns as soon as some of its episodes have ended, and the next call brings new ones. If the
    queue does not fill all engines, it is shared equally. The episodes of an engine that dies go to the others. Raises
    `EngineDied` when none is left, `Stalled` when an engine has finished nothing for `timeout_s` seconds,
    `SamplingAbandoned` soon after `abandoned` is set and the engines have been told to end their episodes, and what
    `EpisodeQueue.record` and the episodes raise.
    """

    def __init__(self, fleet: Fleet, queue: EpisodeQueue, timeout_s: float, abandoned: threading.Event) -> None:
        self.fleet, self.queue, self.timeout_s, self.abandoned = fleet, queue, timeout_s, abandoned
        self.assignments = [Assignment(engine) for engine in fleet.engines]
        self._calls: dict[Any, tuple[Assignment, float]] = {}  # with the start time of each
        self._interrupts: set[Any] = set()  # the calls that interrupt

    def run(self) -> None:
        self._require_wanted()
        self.queue.put_back()
        self._continue()
        while self._calls:
            self._take_in()
            self._continue()

    def abandon(self) -> None:
        """End all running episodes on the engines; waits for that, at most SHUTDOWN_S seconds.

        `abandon` is sent until no call is left: Ray may begin a `play` after an `abandon` that was sent later, and
        its episodes would reach the next stream, which has other slots.
        """
        left, give_up = set(self._calls), time.monotonic() + SHUTDOWN_S
        while True:
            sent = [engine.worker.abandon.remote() for engine in self.fleet.engines]
            _, missing = ray.wait([*left, *sent], num_returns=len(left) + len(sent), timeout=SEND_AGAIN_S)
            left &= set(missing)
            if not missing or time.monotonic() > give_up:
                return

    def _continue(self) -> None:
        """Keep the engines busy, or interrupt them if there are enough groups."""
        if not self.queue.is_enough:
            self.queue.settle(wait=not (self.queue.waiting or any(one.held for one in self.assignments)))
        if self.queue.is_enough:
            self._interrupt()
        else:
            self._hand_out()

    def _take_in(self) -> None:
        """Record the results of calls that have ended; waits for the first one, but no longer than NOTICE_S."""
        # A short wait, so that it is noticed soon when sampling is abandoned.
        calls, oldest = list(self._calls), min(made for _, made in self._calls.values())
        ended, _ = ray.wait(calls, timeout=NOTICE_S)
        self._require_wanted()
        if not ended and time.monotonic() < oldest + self.timeout_s:
            return
        # Here a call has ended, or the oldest one is too late, which this raises.
        done = wait_for_any(calls, "rollout", self.timeout_s, since=oldest)
        for call in done:
            assignment, _ = self._calls.pop(call)
            self._interrupts.discard(call)
            try:
                [finished] = wait_for([call], "rollout", self.timeout_s)
            except (EngineDied, WorkerDied) as error:
                self._lose(assignment, error)
                continue
            for slot, trajectory in finished:
                assignment.held.remove(slot)
                self.queue.record(slot, trajectory, assignment.engine.name)

    def _interrupt(self) -> None:
        """Interrupt the engines and collect what they hold, beside the calls that are running.

        Repeat until all has arrived: Ray may start a `play` after an `interrupt` that was sent later.
        """
        asked = {id(self._calls[call][0]) for call in self._interrupts}
        for assignment in self.assignments:
            if assignment.held and id(assignment) not in asked:
                call = assignment.engine.worker.interrupt.remote()
                self._calls[call] = (assignment, time.monotonic())
                self._interrupts.add(call)

    def _require_wanted(self) -> None:
        if self.abandoned.is_set():
            raise SamplingAbandoned(f"step {self.queue.step}: sampling was abandoned")

    def _lose(self, assignment: Assignment, error: EngineDied | WorkerDied) -> None:
        self.fleet.lose(assignment.engine, error)
        if assignment not in self.assignments:  # it owed two answers
            return
        self.assignments.remove(assignment)
        self.queue.return_first(assignment.held)
        if not (self.assignments or self.queue.is_enough):
            raise EngineDied(str(error)) from error

    def _hand_out(self) -> None:
        """Call every engine that is not being called and has, or gets, episodes to run."""
        num_left = len(self.queue.waiting) + sum(len(one.held) for one in self.assignments)
        share = -(-num_left // len(self.assignments))
        busy = {id(assignment) for assignment, _ in self._calls.values()}
        for assignment in self.assignments:
            if id(assignment) in busy:
                continue
            num_new = max(0, min(assignment.most, share) - len(assignment.held))
            new = self.queue.take(num_new, assignment.engine.name)
            assignment.held |= {request.slot for request in new}
            if assignment.held:
                self._calls[assignment.engine.worker.play.remote(new)] = (assignment, time.monotonic())
