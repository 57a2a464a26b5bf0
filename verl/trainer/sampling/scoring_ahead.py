"""Scoring beside sampling, in a thread of its own: a judge answers about the first groups while others are sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from verl.protocol import Trajectory

Handed = tuple[Sequence[Trajectory], Future[None]]


class ScoringAhead:
    """Has `score` work, in a thread, on the trajectories that are handed over: on all that have come meanwhile at once,
    as a judge that is slow or down costs its time per call.
    """

    def __init__(self, score: Callable[[Sequence[Trajectory]], object]) -> None:
        self._score = score
        self._queue: SimpleQueue[Handed] = SimpleQueue()
        self._handed: dict[int, tuple[Trajectory, Future[None]]] = {}  # by the trajectory's `id`
        self._thread: threading.Thread | None = None

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Hand trajectories over; until `take` they are the thread's. Those that it has already are left out."""
        new = [trajectory for trajectory in trajectories if id(trajectory) not in self._handed]
        if not new:
            return
        done = Future[None]()
        self._handed |= {id(trajectory): (trajectory, done) for trajectory in new}
        self._queue.put((new, done))
        if self._thread is None:  # a daemon: a judge that hangs does not keep the run from ending
            self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
            self._thread.start()

    def has_scored(self, wanted: Sequence[Trajectory]) -> bool:
        """Whether `take` need not wait."""
        return all(self._handed[id(one)][1].done() for one in wanted if id(one) in self._handed)

    def take(self, wanted: Sequence[Trajectory]) -> list[Trajectory]:
        """Wait for those of `wanted` that were handed over, and return them. Raises what scoring them has raised."""
        taken = [self._handed.pop(id(one)) for one in wanted if id(one) in self._handed]
        for _, done in taken:
            done.result()
        return [trajectory for trajectory, _ in taken]

    def forget(self, but: Sequence[Trajectory]) -> None:
        """Forget what was handed over, `but` for these: nobody will take it."""
        kept = {id(trajectory) for trajectory in but}
        self._handed = {number: handed for number, handed in self._handed.items() if number in kept}

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while True:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            try:
                self._score([trajectory for trajectories, _ in batch for trajectory in trajectories])
            except BaseException as error:
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)
