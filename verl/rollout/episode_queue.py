"""Samples a step's groups of trajectories: one queue of episodes for all engines, each of which takes the next ones
when it has room, without synchronized rounds.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from verl.agent.environment import SamplingMode
from verl.config import Config
from verl.errors import EngineDied, RolloutError, SamplingAbandoned, WorkerDied
from verl.protocol import Prompt, Status, Trajectory
from verl.rollout.fleet import SHUTDOWN_S, Engine, Fleet
from verl.rollout.worker import EpisodeRequest
from verl.single_controller import wait_for, wait_for_any


@dataclass(eq=False)
class Group:
    """A group of trajectories: one of `prompt` for each of `modes`; `results` are those that have ended.

    `begun` are those that were interrupted. They are resumed when the group is sampled again, maybe in a later step
    under newer weights; `step` is the one in which the group was begun.
    """

    prompt: Prompt
    modes: Sequence[SamplingMode]
    step: int
    number: int  # within its step
    results: dict[int, Trajectory] = field(default_factory=dict)
    begun: dict[int, Trajectory] = field(default_factory=dict)
    begun_at: dict[int, str] = field(default_factory=dict)  # the name of the engine
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.modes[0]}-{self.step}-{self.number}"

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.modes)

    def missing(self) -> list[int]:
        return [index for index in range(len(self.modes)) if index not in self.results]

    def trajectories(self, mode: SamplingMode) -> list[Trajectory]:
        """The group's trajectories that have ended, in order."""
        return [self.results[index] for index in sorted(self.results) if self.modes[index] == mode]

    def oldest_version(self) -> int | None:
        """Oldest version of the weights that sampled any of it; None if nothing was sampled."""
        sampled = [*self.results.values(), *self.begun.values()]
        return min((version for one in sampled for version, _ in one.weight_versions), default=None)

    def seed(self, config: Config, index: int) -> int | None:
        """A seed in [0, 2^63), by the run's seed and by what is sampled, not by which engine samples it or when; None
        without `rollout.seed_per_request`.
        """
        if not config.actor_rollout_ref.rollout.seed_per_request:
            return None
        mode = self.modes[index]
        place = self.modes[:index].count(mode)
        name = f"{config.trainer.seed}/{mode}/{self.step}/{self.number}/{place}/{self.attempts.get(index, 0)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def groups_of(prompts: Sequence[Prompt], modes: Sequence[SamplingMode], step: int, first: int = 0) -> list[Group]:
    """A group for each prompt, numbered from `first`."""
    return [Group(prompt, modes, step, first + number) for number, prompt in enumerate(prompts)]


NextGroups = Callable[[Sequence[Group], bool], Sequence[Group] | None]
"""Given the groups completed since the last call, the groups to begin now; None when there are enough.

It may take time to decide whether a complete group is useful, and answer in a later call. If the second argument is
true, nothing is being sampled, and it waits until it has decided about all.
"""


class EpisodeQueue:
    """The episodes of `groups`, and of those that `next_groups` adds, that are still to be sampled.

    A slot is one trajectory. Slots wait in one queue, in order. A slot that failed goes to its end and is retried with
    another seed, at most `agent.max_redraws` times.
    """

    def __init__(
        self, config: Config, groups: Sequence[Group], step: int, next_groups: NextGroups | None = None
    ) -> None:
        self.config, self.step, self._next_groups = config, step, next_groups
        self.groups: list[Group] = []
        self.slots: list[tuple[Group, int]] = []
        self.waiting = deque[int]()
        self.num_unfinished = self.num_attempts = self.num_failures = self.num_redraws = 0
        self.first_failure: str | None = None
        self.is_enough = False
        self._complete: list[Group] = []
        self.add(groups)

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.groups.append(group)
            if group.is_complete:
                self._complete.append(group)
            slots = [(group, index) for index in group.missing()]
            self.waiting.extend(range(len(self.slots), len(self.slots) + len(slots)))
            self.slots += slots
            self.num_unfinished += len(slots)

    def settle(self, wait: bool = False) -> None:
        """Report complete groups to `next_groups`, and add those that it returns. wait: for all of its decisions."""
        while self._next_groups and not self.is_enough:
            complete, self._complete = self._complete, []
            further = self._next_groups(complete, wait)
            self.is_enough = further is None
            self.add(further or ())
            if not self._complete:
                return

    def take(self, most: int, engine: str = "") -> list[EpisodeRequest]:
        """The next episodes of the queue for the engine of that name; those begun on another engine come last.

        An interrupted episode's search continues on its own engine; on another one it has to be repeated. An episode
        with state has it on its own engine only, and begins again on another one.
        """
        taken, elsewhere = list[int](), list[int]()
        while self.waiting and len(taken) < most:
            slot = self.waiting.popleft()
            group, index = self.slots[slot]
            begun_elsewhere = index in group.begun and group.begun_at.get(index, engine) != engine
            (elsewhere if begun_elsewhere else taken).append(slot)
        room = most - len(taken)
        self.waiting.extendleft(reversed(elsewhere[room:]))
        return [self.request(slot) for slot in [*taken, *elsewhere[:room]]]

    def request(self, slot: int) -> EpisodeRequest:
        group, index = self.slots[slot]
        seed, begun = group.seed(self.config, index), group.begun.get(index)
        return EpisodeRequest(slot, group.prompt, group.id, seed, group.modes[index], begun)

    def record(self, slot: int, trajectory: Trajectory, engine: str = "") -> None:
        """Record a result. Raises RolloutError once the share of failures is sure to exceed its limit."""
        group, index = self.slots[slot]
        if trajectory.status is None:  # it was interrupted: the episode is resumed later
            if trajectory.num_turns:
                before = group.begun.get(index)
                group.begun[index] = trajectory
                # An engine that had no place for it gives it back as it was: its state stays where it was begun.
                if before is None or _progress(trajectory) != _progress(before):
                    group.begun_at[index] = engine
            else:  # it had begun again, because the state of its episode was lost
                group.begun.pop(index, None)
            self.waiting.append(slot)
            return
        self.num_attempts += 1
        group.begun.pop(index, None)
        failed = trajectory.status is Status.FAILED
        if failed:
            self.num_failures += 1
            self.first_failure = self.first_failure or trajectory.failure
        if failed and group.attempts.get(index, 0) < self.config.agent.max_redraws:
            group.attempts[index] = group.attempts.get(index, 0) + 1
            self.num_redraws += 1
            self.waiting.append(slot)
        else:
            group.results[index] = trajectory
            self.num_unfinished -= 1
            if group.is_complete:
                self._complete.append(group)
        self._raise_if_too_many_failed()

    def require_few_failures(self) -> None:
        """Check the share of failures at the end, when sampling is over. Raises RolloutError."""
        self.num_unfinished = 0
        self._raise_if_too_many_failed()

    def return_first(self, slots: Iterable[int]) -> None:
        """Put slots whose samples are lost at the front of the queue, with the same seeds."""
        self.waiting.extendleft(sorted(slots, reverse=True))

    def put_back(self) -> None:
        """Put all unfinished slots, whose samples are lost, back into the queue, with the same seeds."""
        self.waiting = deque(slot for slot, (group, index) in enumerate(self.slots) if index not in group.results)

    def stats(self) -> dict[str, float]:
        return {
            "env/failed_ratio": self.num_failures / max(1, self.num_attempts),
            "env/redraws": float(self.num_redraws),
        }

    def _raise_if_too_many_failed(self) -> None:
        """Raise if the limit is exceeded even if everything unfinished succeeds at its next attempt.

        Further failures and retries cannot undo that, so the outcome does not depend on their order.
        """
        limit = self.config.agent.max_failed_ratio
        if self.num_failures > limit * (self.num_attempts + self.num_unfinished):
            raise RolloutError(
                f"step {self.step}: {self.num_failures} of {self.num_attempts} episodes failed, more than "
                f"agent.max_failed_ratio={limit:g} allows for {len(self.slots)} trajectories. "
                f"The first failure: {self.first_failure}"
            )


def _progress(begun: Trajectory) -> tuple[str | None, int]:
    """What changes whenever an engine continues an interrupted episode: where its state is kept, or its tokens."""
    return begun.episode_key, len(begun.ids)


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
