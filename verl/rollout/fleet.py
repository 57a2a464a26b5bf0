"""The engines of a run: where they are, which of them can be called now, and what happens when one dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from verl.config import Config
from verl.config.rules.placement import placement_of
from verl.errors import EngineDied, VerlError, WorkerDied
from verl.process.startup import phase, tell
from verl.rollout.node_retriever import NodeRetrievers
from verl.rollout.worker import RolloutWorker
from verl.single_controller import ResourcePool, wait_for, wait_for_any
from verl.single_controller.nodes import SamplingNodes, is_alive

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0


@dataclass(frozen=True)
class EngineLocation:
    """The location of an engine: a pool, and its first rank there."""

    pool: ResourcePool
    rank: int

    @property
    def node(self) -> int:
        """The number of its node in the pool."""
        return self.rank // self.pool.workers_per_node

    @property
    def address(self) -> str:
        """The address of its node; empty if there is only one node."""
        return self.pool.nodes[self.node].address if self.pool.nodes else ""


@dataclass(eq=False)
class Engine:
    """An engine's worker, which is `starting` (a reference to its answer) or runs `at_once` episodes."""

    worker: Any
    location: EngineLocation
    starting: Any
    at_once: int = 0

    @property
    def name(self) -> str:
        """The engine's name in messages, which says where it is."""
        return f"engine {self.location.address} {self.location.rank}".replace("  ", " ")


class Fleet:
    """Starts the engines and keeps `engines`, those that can be called.

    An engine that dies is restarted where it was, in the background, up to `rollout.max_restarts` times in a run; the
    others continue. Engines of a lost node are not restarted, and nodes that join the cluster get engines, up to
    `rollout.max_nnodes`. Where engines and trained roles take turns on GPUs, an engine is started only between two
    versions of the weights, since it measures the free memory.
    """

    def __init__(self, config: Config, pool: ResourcePool, nodes: SamplingNodes | None) -> None:
        """Start engines on the nodes of `pool`, or on `nodes` if given."""
        self.engines: list[Engine] = []
        self.takes_turns = pool.device == "cuda" and config.trainer.layout == "colocated"
        self._config, self._nodes = config, nodes
        self._place = placement_of(config, pool.device)
        self._timeout_s = config.trainer.step_timeout_s
        rollout = config.actor_rollout_ref.rollout
        self._most_nodes, self._restarts_left = rollout.max_nnodes or rollout.nnodes, rollout.max_restarts
        self._numbers = itertools.count()  # of the engines, in the order in which they are started
        self._coming: list[Engine] = []
        self._vacant: list[EngineLocation] = []  # where an engine died and is to be restarted
        self._restarts_at = Counter[str]()  # by address
        self._joined: set[str] = set()  # addresses of nodes that were not there at the start
        self._died = EngineDied("there is no rollout engine")  # of the latest engine that died
        self._retrievers = NodeRetrievers(config)
        if nodes is None:
            locations = self._locations(pool, self._place.num_engines)
        else:
            locations = [one for own in nodes.pools for one in self._locations(own, self._place.engines_per_node)]
        tell(f"starting {_count(locations)}")
        self._start(locations)

    @property
    def is_lost(self) -> bool:
        """Whether no engine is left, and none is starting."""
        return not (self.engines or self._coming or self._vacant)

    def wait(self) -> None:
        """Wait until all starting engines have started. Raises their errors, and EngineDied when all are lost."""
        self._leave_lost_nodes()
        self._start(self._vacant)
        if self._coming:
            with phase(f"waiting for {_count(self._coming)}"):
                self._admit(self._coming)
        self._require_engines()

    def renew(self) -> None:
        """Add engines that have started and nodes that have joined; to be called between two versions of weights."""
        self._leave_lost_nodes()
        for pool in self._nodes.join(self._most_nodes) if self._nodes else []:
            log.warning("node %s has joined; it samples as soon as its engines have started", pool.address)
            self._joined.add(pool.address)
            self._start(self._locations(pool, self._place.engines_per_node))
        self._start(self._vacant)
        if self.takes_turns:
            self._admit(self._coming)
        elif self._coming:
            started, _ = ray.wait([one.starting for one in self._coming], num_returns=len(self._coming), timeout=0)
            self._admit([engine for engine in self._coming if engine.starting in started])

    def ask(self, method: str, *args: Any) -> None:
        """Call a method of all engines. Those that die are lost; raises EngineDied when none is left."""
        self._answers({getattr(one.worker, method).remote(*args): one for one in self.engines}, f"rollout {method}")
        self._require_engines()

    def ask_each(
        self, method: str, args: Mapping[Engine, tuple[Any, ...]], on_loss: Callable[[], None] = lambda: None
    ) -> dict[Engine, Any]:
        """Call a method of some engines, each with its own arguments. Returns the answers of those that are alive.

        on_loss: called each time one has died, while the answers of others may still be awaited.
        """
        calls = {getattr(engine.worker, method).remote(*own): engine for engine, own in args.items()}
        return dict(self._answers(calls, f"rollout {method}", on_loss))

    def lose(self, engine: Engine, error: VerlError) -> None:
        """Continue without an engine that died of `error`; may be called twice for one engine."""
        if engine not in self._everyone:
            return
        self._died = EngineDied(str(error))
        self._remove([engine])
        # An engine of a lost node cannot be restarted there, so it uses up no restart.
        if (address := engine.location.address) and not is_alive(address):
            self._leave(address)
        elif self._restarts_left:
            self._restarts_left -= 1
            self._restarts_at[address] += 1
            log.warning("%s. The engine is restarted (restarts left: %d)", error, self._restarts_left)
            self._vacant.append(engine.location)
            # Where it shares GPUs with the trained roles, it has to wait for the next version of the weights.
            if not self.takes_turns:
                self._start(self._vacant)
        else:
            log.warning("%s. It is not restarted: no restart is left (actor_rollout_ref.rollout.max_restarts)", error)

    def lose_at(self, address: str, error: VerlError) -> None:
        """Continue without the engines of a node that cannot receive weights."""
        for engine in [one for one in self._everyone if one.location.address == address]:
            self.lose(engine, error)

    def shutdown(self) -> None:
        """End all engines, also those that did not start or do not answer."""
        engines = self._everyone
        with contextlib.suppress(Exception):  # the worker is killed next, whatever is wrong with it
            ray.wait([one.worker.shutdown.remote() for one in engines], num_returns=len(engines), timeout=SHUTDOWN_S)
        self._remove(engines)
        self._retrievers.close()
        self._vacant = []

    @property
    def _everyone(self) -> list[Engine]:
        return [*self.engines, *self._coming]

    def _locations(self, pool: ResourcePool, num_engines: int) -> list[EngineLocation]:
        ranks = (number * self._place.gpus_per_engine % pool.world_size for number in range(num_engines))
        return [EngineLocation(pool, rank) for rank in ranks]

    def _start(self, locations: list[EngineLocation]) -> None:
        """Start an engine at each of the locations, and clear the list."""
        remote_class = ray.remote(RolloutWorker)
        # One thread for the event loop's own process; the engine's process is given its threads by the engine.
        variables = {"OMP_NUM_THREADS": "1"}
        for location in locations:
            options = location.pool.actor_options(location.rank, self._place.gpus_per_engine, variables)
            worker = remote_class.options(**options).remote(self._config, location.pool.device, next(self._numbers))
            retriever = self._retrievers.ready_at(location.pool, location.node)
            self._coming.append(Engine(worker, location, worker.start.remote(retriever)))
        locations.clear()

    def _admit(self, engines: Sequence[Engine]) -> None:
        """Wait until the engines have started, and let them be called."""
        starting = {engine.starting: engine for engine in engines}
        for engine, at_once in self._answers(starting, "start of the rollout engines"):
            engine.at_once = at_once
            self._coming.remove(engine)
            self.engines.append(engine)

    def _answers(
        self, calls: dict[Any, Engine], what: str, on_loss: Callable[[], None] = lambda: None
    ) -> list[tuple[Engine, Any]]:
        """Answers of the live engines; dead ones are lost. Raises any other error of an engine as soon as it occurs."""
        begun, waiting, answers = time.monotonic(), dict(calls), list[tuple[Engine, Any]]()
        while waiting:
            for call in wait_for_any(list(waiting), what, self._timeout_s, since=begun):
                engine = waiting.pop(call)
                try:
                    [answer] = wait_for([call], what, self._timeout_s)
                except (EngineDied, WorkerDied) as error:
                    self.lose(engine, error)
                    on_loss()
                except (VerlError, RayTaskError) as error:
                    # A node that joined later may turn out unusable, and is left; on any other node the run fails.
                    if engine.location.address not in self._joined:
                        raise
                    self._leave(engine.location.address, unusable=str(error))
                else:
                    answers.append((engine, answer))
        # An engine may have been lost after it had answered.
        return [(engine, answer) for engine, answer in answers if engine in self._everyone]

    def _leave_lost_nodes(self) -> None:
        """Leave all lost nodes, also those where no call was made, or Ray is still waiting for a placement."""
        for address in {pool.address for pool in self._nodes.pools} if self._nodes else ():
            if not is_alive(address):
                self._leave(address)

    def _leave(self, address: str, unusable: str = "") -> None:
        """Leave a node that is lost, or that is `unusable` for the given reason."""
        self._remove([engine for engine in self._everyone if engine.location.address == address])
        self._vacant = [location for location in self._vacant if location.address != address]
        self._retrievers.leave(address)
        if self._nodes:
            self._nodes.give_up(address, unusable)
        if not unusable:
            self._restarts_left += self._restarts_at.pop(address, 0)  # Ray notices a lost node only after a while
            log.warning("node %s is lost; %s left", address, _count(self.engines))

    def _remove(self, engines: Sequence[Engine]) -> None:
        """Forget the engines, and kill those that are still alive."""
        self.engines = [engine for engine in self.engines if engine not in engines]
        self._coming = [engine for engine in self._coming if engine not in engines]
        for engine in engines:
            with contextlib.suppress(Exception):  # it is gone
                ray.kill(engine.worker)

    def _require_engines(self) -> None:
        if not self.engines:
            raise self._died


def _count(engines: Sequence[Any]) -> str:
    return "1 rollout engine" if len(engines) == 1 else f"{len(engines)} rollout engines"
