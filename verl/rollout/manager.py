"""The driver's view of all rollout engines: collect trajectories, load weights, sleep and wake."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray

from verl.agent.sampling import How
from verl.config import Config
from verl.config.placement import placement_of
from verl.errors import EngineDied, WorkerDied, WorkerError
from verl.phases import Phase
from verl.protocol import Prompt, Trajectory
from verl.rollout.draws import Draws
from verl.rollout.stream import Place, Stream
from verl.rollout.weight_stream import WeightStream
from verl.rollout.worker import RolloutWorker
from verl.single_controller import ResourcePool, wait_for
from verl.startup import phase, tell

PublishWeights = Callable[[], WeightStream]

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0


class RolloutManager:
    """Starts the engines and spreads prompts over them. Every wait ends after `trainer.step_timeout_s`.

    The engines load in the background: the first call waits for them. On GPUs that they share with the trained roles
    they are waited for here, since an engine measures the free memory while it starts. `stats` describes the latest
    `collect`.

    When an engine or its worker has died, all are started anew and what was asked of them is asked again, up to
    `rollout.max_restarts` times in a run; then it is an `EngineDied`. When the trainer dies while its weights are
    loaded, that is a `WorkerDied`, and the engines do not sample again.
    """

    def __init__(self, config: Config, pool: ResourcePool) -> None:
        self.config = config
        self.timeout_s = config.trainer.step_timeout_s
        self.stats: dict[str, float] = {}
        self._pool = pool
        self._workers: list[Any] = []
        self._starting: list[Any] = []
        self._at_once: list[int] = []  # episodes, by engine
        self._restarts_left = config.actor_rollout_ref.rollout.max_restarts
        self._publish: PublishWeights | None = None  # those that the engines have
        self._start()

    def check(self) -> None:
        """Raise `EnvironmentUnavailable` when an engine cannot reach the environment's infrastructure."""
        self._surviving(partial(self._call_all, "check"))

    def collect(
        self, prompts: Sequence[Prompt], n: int, step: int, how: How = "train", first_group: int = 0
    ) -> list[Trajectory]:
        """`n` trajectories of each prompt, in prompt order. Prompts wait in one queue for the engines.

        Groups are numbered from `first_group`, so that several calls in one step draw different things.
        A trajectory that failed (infrastructure) is drawn again, with another seed, at most `agent.max_redraws` times;
        what still fails is returned with status `FAILED`. Raises `RolloutError` with the first failure's text when
        more than `agent.max_failed_ratio` of all attempts failed, or are sure to.
        """
        self._wait_until_started()
        draws = Draws(self.config, prompts, n, step, how, first_group)
        self._surviving(partial(self._sample, draws))
        if draws.num_failures:
            log.warning("step %d: %d attempts failed, the first: %s", step, draws.num_failures, draws.first_failure)
        self.stats = draws.stats()
        return draws.trajectories()

    def load_weights(self, publish: PublishWeights) -> None:
        """Give the weights that `publish` offers to every engine; it is called again for engines started later.

        On a GPU the engines drop what they have there, wake for the weights alone, and for the cache when these are
        loaded and the trainer's part of the memory is released, which happens whether or not that went well. Raises
        `WeightSyncError` when an engine read something else; one that has taken some buckets by then samples no more.
        """
        self._surviving(partial(self._give, publish))
        self._publish = publish

    def sleep(self) -> None:
        """Free the GPU memory of the engines until the next `load_weights`. Does nothing on CPU."""
        self._surviving(partial(self._enter, Phase.UPDATE))

    def shutdown(self) -> None:
        """End all engines, also those that did not start or do not answer."""
        with contextlib.suppress(Exception):  # whatever is wrong with a worker, it is killed next
            ray.wait([w.shutdown.remote() for w in self._workers], num_returns=len(self._workers), timeout=SHUTDOWN_S)
        for worker in self._workers:
            with contextlib.suppress(Exception):
                ray.kill(worker)
        self._workers = []

    def _start(self) -> None:
        self._workers = _start_workers(self.config, self._pool)
        tell(f"starting {self._engines_in_words}")
        self._starting = [worker.start.remote() for worker in self._workers]
        if self._pool.device == "cuda" and self.config.trainer.layout == "colocated":
            self._enter(Phase.UPDATE)  # the trained roles load next, on the same devices

    def _surviving(self, call: Callable[[], None]) -> None:
        """Call it; when an engine has died, start all anew with the weights that they had, and call it again."""
        died = False
        while True:
            try:
                if died:
                    self._start_anew()
                return call()
            except EngineDied as error:
                if not self._restarts_left:
                    raise
                died = True
                self._restarts_left -= 1
                log.warning("%s. The engines are started anew, at most %d times more", error, self._restarts_left)

    def _start_anew(self) -> None:
        self.shutdown()
        self._start()
        self._wait_until_started()
        if self._publish is not None:
            self._give(self._publish)

    def _give(self, publish: PublishWeights) -> None:
        self._enter(Phase.SYNC)
        stream = publish()
        try:
            for bucket in stream.buckets:
                self._call_all("load_weights", bucket)
        except BaseException:
            with contextlib.suppress(WorkerError):  # of a trainer that is dead, and has been told
                stream.release()
            raise
        stream.release()
        self._enter(Phase.SAMPLE)

    def _enter(self, phase: Phase) -> None:
        if self._pool.device == "cuda":
            self._call_all("enter", phase)

    def _sample(self, draws: Draws) -> None:
        places = [Place(worker, at_once) for worker, at_once in zip(self._workers, self._at_once, strict=True)]
        try:
            with _workers_are_engines():
                Stream(places, draws, self.timeout_s).run()
        except Exception:
            calls = [worker.abandon.remote() for worker in self._workers]
            ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_S)
            raise

    def _call_all(self, method: str, *args: Any) -> None:
        self._wait_until_started()
        with _workers_are_engines():
            wait_for([getattr(w, method).remote(*args) for w in self._workers], f"rollout {method}", self.timeout_s)

    def _wait_until_started(self) -> None:
        if self._starting:
            with phase(f"waiting for {self._engines_in_words}"), _workers_are_engines():
                self._at_once = wait_for(self._starting, "start of the rollout engines", self.timeout_s)
            self._starting = []

    @property
    def _engines_in_words(self) -> str:
        return "1 rollout engine" if len(self._workers) == 1 else f"{len(self._workers)} rollout engines"


@contextlib.contextmanager
def _workers_are_engines() -> Iterator[None]:
    """The process that an engine belongs to takes it along when it dies."""
    try:
        yield
    except WorkerDied as error:
        raise EngineDied(str(error)) from error


def _start_workers(config: Config, pool: ResourcePool) -> list[Any]:
    place = placement_of(config, pool.device)
    ranks, num_engines = place.gpus_per_engine, place.num_engines
    remote_class = ray.remote(RolloutWorker)
    # One thread for the event loop's own process; the engine's process is given its threads by the engine.
    variables = {"OMP_NUM_THREADS": "1"}
    options = [pool.actor_options(i * ranks % pool.world_size, ranks, variables) for i in range(num_engines)]
    return [remote_class.options(**option).remote(config, pool.device) for option in options]
