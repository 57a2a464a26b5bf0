"""The driver's view of all rollout engines: collect trajectories, load weights, sleep and wake."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import ray
from ray.exceptions import RayError

from verl.agent.environment import SamplingMode
from verl.config import Config
from verl.errors import EngineDied, WorkerError
from verl.phases import Phase
from verl.protocol import Prompt, Trajectory
from verl.rollout.episode_queue import EpisodeQueue, Group, NextGroups, Stream, groups_of
from verl.rollout.fleet import Fleet
from verl.rollout.weight_stream import WeightBroadcast, WeightRelay, WeightSender, WeightStream
from verl.rollout.worker import ranks_per_engine
from verl.single_controller import ResourcePool
from verl.single_controller.nodes import SamplingNodes
from verl.tracking.spans import Span
from verl.weight_sync.buckets import ExportedWeights

PublishWeights = Callable[[], WeightStream]

log = logging.getLogger(__name__)

SPANS_S = 5.0


class RolloutManager:
    """Starts the engines and spreads prompts over them. Every wait ends after `trainer.step_timeout_s`.

    The engines load in the background, and the first call waits for them. On GPUs shared with the trained roles, the
    constructor waits, since an engine measures the free memory while it starts. `stats` describes the latest `collect`.

    When an engine dies, the others continue and take over its episodes; `Fleet` restarts it. When none is left,
    `EngineDied` is raised. When the trainer dies while its weights are loaded, `WorkerDied` is raised, and the engines
    cannot sample any more.
    """

    def __init__(self, config: Config, pool: ResourcePool, nodes: SamplingNodes | None = None) -> None:
        """Start engines on the nodes of `pool`, where the trained roles are, or on `nodes` if given."""
        self.config = config
        self.timeout_s = config.trainer.step_timeout_s
        self.stats: dict[str, float] = {}
        self._device = pool.device
        self._publish: PublishWeights | None = None  # the weights that the engines have
        self._abandoned = threading.Event()
        self._nodes = nodes
        self._relay = WeightRelay(pool, self.timeout_s) if nodes else None
        self._fleet = Fleet(config, pool, nodes)
        self._broadcast: WeightBroadcast | None = None
        if nodes and config.actor_rollout_ref.rollout.weight_sync.is_broadcast(pool.device):
            self._broadcast = WeightBroadcast(self._fleet, ranks_per_engine(config, pool.device))
        if self._fleet.takes_turns:
            self._surviving(partial(self._enter, Phase.UPDATE))  # the trained roles load next, on the same devices

    @property
    def num_engines(self) -> int:
        """Number of engines that can be called now."""
        return len(self._fleet.engines)

    def check(self) -> None:
        """Raise `EnvironmentUnavailable` when an engine cannot reach the environment's infrastructure."""
        self._surviving(partial(self._fleet.ask, "check"))

    def attention(self) -> str:
        """The attention backends of the engines that can be called, as vLLM names them."""
        answers = self._fleet.ask_each("attention", dict.fromkeys(self._fleet.engines, ()))
        return ", ".join(sorted({name for backends in answers.values() for name in backends}))

    def collect(self, prompts: Sequence[Prompt], n: int, step: int, mode: SamplingMode = "train") -> list[Trajectory]:
        """`n` trajectories of each prompt, in prompt order. Prompts wait in one queue for the engines.

        A trajectory that failed (infrastructure) is retried with another seed, at most `agent.max_redraws` times; if it
        still fails, it is returned with status `FAILED`. Raises `RolloutError` with the first failure's text when more
        than `agent.max_failed_ratio` of all attempts failed, or are sure to fail.
        """
        groups = groups_of(prompts, [mode] * n, step)
        self.collect_groups(groups, step)
        return [trajectory for group in groups for trajectory in group.trajectories(mode)]

    def collect_groups(self, groups: Sequence[Group], step: int, next_groups: NextGroups | None = None) -> None:
        """Complete `groups`, and those that `next_groups` adds as others are completed, until it has enough.

        Then the other trajectories are interrupted, and their groups keep what was sampled of them. Failures are
        handled as in `collect`.
        """
        queue = EpisodeQueue(self.config, groups, step, next_groups)
        self._surviving(partial(self._sample, queue))
        queue.require_few_failures()
        if queue.num_failures:
            log.warning("step %d: %d attempts failed, the first: %s", step, queue.num_failures, queue.first_failure)
        self.stats = queue.stats()

    def take_spans(self) -> dict[str, list[Span]]:
        """The spans of each engine since the last call, by its name; none of an engine that does not answer.

        May be called while another method is running.
        """
        calls = {engine.worker.take_spans.remote(): engine.name for engine in list(self._fleet.engines)}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=SPANS_S) if calls else ([], [])
        spans = {}
        for call in ready:
            with contextlib.suppress(RayError):  # the engine has died, which the fleet's next call notices
                spans[calls[call]] = ray.get(call)
        return spans

    def abandon(self) -> None:
        """Make another thread's `collect` stop sampling and raise `SamplingAbandoned`, until `allow` is called.

        May be called while another method is running.
        """
        self._abandoned.set()
        for engine in self._fleet.engines:
            engine.worker.abandon.remote()

    def allow(self) -> None:
        """Allow sampling again after `abandon`."""
        self._abandoned.clear()

    def load_weights(self, publish: PublishWeights) -> None:
        """Load the weights that `publish` offers into every engine; it is called again for engines started later.

        On a GPU the engines drop their weights and cache, then wake for the weights alone, and for the cache once these
        are loaded and the trainer's part of the memory is released, which happens even after a failure. Raises
        `WeightSyncError` when an engine read wrong values; if it had loaded some buckets, it cannot sample any more.
        """

        def renew_and_send() -> None:
            self._fleet.renew()
            self._send(publish)

        self._surviving(renew_and_send, with_weights=False)
        self._publish = publish

    def sleep(self) -> None:
        """Free the GPU memory of the engines until the next `load_weights`. Does nothing on CPU."""
        self._surviving(partial(self._enter, Phase.UPDATE))

    def shutdown(self) -> None:
        """End all engines, also those that did not start or do not answer."""
        self._fleet.shutdown()
        if self._relay:
            self._relay.close()

    def _surviving(self, call: Callable[[], None], with_weights: bool = True) -> None:
        """Do `call` once there are engines that have the latest weights, and again each time all of them have died."""
        while True:
            try:
                if not self._fleet.engines:
                    self._fleet.wait()
                    if self._publish is not None and with_weights:
                        self._send(self._publish)
                return call()
            except EngineDied:
                if self._fleet.is_lost:
                    raise

    def _send(self, publish: PublishWeights) -> None:
        """Have all engines load the weights that `publish` offers, bucket by bucket."""
        self._enter(Phase.SYNC)
        # Sampling nodes may have joined or left since the last version.
        if self._relay and self._nodes:
            self._relay.serve(self._nodes.pools)
        stream = publish()
        try:
            if self._broadcast and stream.sender:
                self._broadcast.prepare(stream.sender)
            for bucket in stream.buckets:
                self._fleet.ask("load_weights", self._everywhere(bucket, stream.sender))
        except BaseException:
            # The trainer's part of the memory is released after a failure, too.
            with contextlib.suppress(WorkerError):  # of a dead trainer, which has been reported
                stream.release()
            raise
        # The cache of the engines may need the memory that this frees.
        stream.release()
        self._enter(Phase.SAMPLE)

    def _everywhere(self, bucket: ExportedWeights, sender: WeightSender | None) -> ExportedWeights:
        """The bucket, once all engines can read it."""
        received = self._broadcast.received(bucket, sender) if self._broadcast and sender else None
        if received or not self._relay:
            return received or bucket
        return self._relay.carried(bucket, self._fleet.lose_at)

    def _enter(self, phase: Phase) -> None:
        if self._device == "cuda":
            self._fleet.ask("enter", phase)

    def _sample(self, queue: EpisodeQueue) -> None:
        stream = Stream(self._fleet, queue, self.timeout_s, self._abandoned)
        try:
            stream.run()
        except Exception:
            stream.abandon()
            raise
