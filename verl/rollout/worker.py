"""One engine with its episodes: runs as a Ray actor, with one coroutine per trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.agent.environment import Generation, Sampler, Sampling, SamplingMode, make_environment, sampling_of
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.pause import Interrupted, OpenAnswers, Pause
from verl.config import Config
from verl.config.rules.placement import placement_of
from verl.engine.device.runtime import LEAST_IN_BFLOAT16, cpu_has_bfloat16, resolve_device, resolve_engine_dtype
from verl.errors import ConfigError, EngineDied, EnvironmentUnavailable, RolloutError, VerlError
from verl.phases import Phase
from verl.pretrained import load_model_config, load_policy_tokenizer
from verl.process.by_name import in_words
from verl.process.event_loop import end_all
from verl.process.ranks import enter_working_dir
from verl.process.startup import collect_rarely, engine_threads
from verl.process.watchdog import offer_stacks
from verl.protocol import Prompt, Trajectory
from verl.rollout.engine_settings import DUMMY, EngineSettings
from verl.tracking.spans import OverlapRecorder, Span, gaps
from verl.weight_sync.buckets import ExportedWeights
from verl.weight_sync.group import Rendezvous

if TYPE_CHECKING:
    from verl.rollout.engine import VLLMEngine


logger = logging.getLogger(__name__)

WAITING = "wait for environment"
TOGETHER_S = 0.05  # episodes that end within this time are reported together
SPREAD = 2654435761  # Knuth's multiplier for hashing, so that seeds of engines and neighbouring runs are far apart


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode to run, identified by its `slot`, or to resume from `begun`.

    With a `seed` its tokens do not depend on what else is sampled.
    """

    slot: int
    prompt: Prompt
    group_id: str
    seed: int | None
    mode: SamplingMode = "train"
    begun: Trajectory | None = None


@dataclass(frozen=True)
class WatchedSampler:
    """A sampler that records when it was busy."""

    sampler: Sampler
    busy: OverlapRecorder

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        with self.busy():
            return await self.sampler.generate(ids, sampling)


class RolloutWorker:
    """An engine, a tokenizer and an environment, in one process. All methods run on one event loop.

    The constructor does nothing heavy, so that a driver can start several workers in parallel.
    """

    def __init__(self, config: Config, device: str, number: int = 0) -> None:
        """`number`: that of the engine in the run; see `settings_of`."""
        enter_working_dir()
        offer_stacks()
        self.config = config
        self.device = device
        self._number = number
        self._playing: dict[asyncio.Task[Trajectory], int] = {}  # and their slots
        self._answers = OpenAnswers()
        self._pause = Pause(self._answers)
        self._interrupting = asyncio.Lock()
        self._in_episodes, self._in_engine = OverlapRecorder("rollouts"), OverlapRecorder("generate")

    async def start(self, retriever: object = None) -> int:
        """Load the model and the environment. Returns how many episodes run at once.

        `retriever`: what Ray waits for first, on a node that starts a retriever.
        """
        config = self.config
        self.tokenizer = load_policy_tokenizer(config)
        self.environment = make_environment(config, self.tokenizer)
        self.limits = EpisodeLimits.from_config(config)
        self.engine = build_engine(config, self.limits.window, self.device, gets_weights=True, number=self._number)
        await self.engine.start()
        collect_rarely()
        at_once = config.actor_rollout_ref.rollout.max_concurrent
        if at_once is None:
            # What fits into the cache: on average, a trajectory that fills its window in the end fills half of it.
            at_once = max(1, int(2 * self.engine.whole_sequences))
        self._places = asyncio.Semaphore(at_once)
        return at_once

    async def check(self) -> None:
        """Raise `EnvironmentUnavailable` when the environment's infrastructure does not answer on this node."""
        try:
            await self.environment.check()
        except EnvironmentUnavailable as error:
            raise EnvironmentUnavailable(f"on host {socket.gethostname()}: {error}") from error

    async def attention(self) -> list[str]:
        """The engine's attention backends, as vLLM names them."""
        [backends, *_] = await self.engine.on_ranks("attention_backends")
        return list(backends)

    async def play(self, new: Sequence[EpisodeRequest]) -> list[tuple[int, Trajectory]]:
        """Start `new` episodes. Returns those, of all, that have ended since the last call; waits for at least one.

        An unavailable environment makes a `FAILED` trajectory. Any other error ends the call and all running episodes,
        as a typed error that names the group.
        """
        playing = self._playing
        for request in new:
            playing[asyncio.create_task(self._play(request, self._pause))] = request.slot
        if not playing:  # interrupted before this call began
            return []
        await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        # What ends soon after the first one goes into the same answer.
        await asyncio.wait(playing, timeout=TOGETHER_S)
        if playing is not self._playing:  # they were abandoned or interrupted; running ones belong to another call
            return []
        try:
            return [(playing.pop(task), task.result()) for task in list(playing) if task.done()]
        except BaseException:
            await self.abandon()
            raise

    async def interrupt(self) -> list[tuple[int, Trajectory]]:
        """Interrupt all running episodes and return them; those without a `status` can be resumed.

        It only waits for the next token of turns that are being sampled. Calls to the environment continue, and
        episodes with state stay open: a trajectory that is resumed in this worker gets them back. Raises what episodes
        have raised.
        """
        async with self._interrupting:
            # A `play` that still waits for these episodes sees by the new dict that they are no longer its own.
            playing, self._playing = self._playing, {}
            if not playing:  # an earlier call is still on its way
                await asyncio.sleep(TOGETHER_S)
                return []
            pause, self._pause = self._pause, Pause(self._answers)
            pause.begin()
            left: set[asyncio.Task[Trajectory]] = set(playing)
            try:
                # Repeated, since a request that is still on its way to the engine is missed.
                while left:
                    await self.engine.interrupt()
                    _, left = await asyncio.wait(left, timeout=TOGETHER_S)
                return [(slot, task.result()) for task, slot in playing.items()]
            except BaseException:
                await end_all(playing)
                raise

    async def abandon(self) -> None:
        """End and close all episodes, also those that are being or were interrupted, before it returns."""
        async with self._interrupting:
            tasks, self._playing = list(self._playing), {}
            await end_all(tasks)
            self._answers.forget()
            await self._answers.closed()

    async def take_spans(self) -> list[Span]:
        """Spans since the last call: `rollouts`, and in them `generate`, or `WAITING` with no episode in the engine."""
        busy, episodes = self._in_engine.take(), self._in_episodes.take()
        waits = [gap for span in episodes for gap in gaps(busy, span, WAITING)]
        return [*episodes, *busy, *waits]

    async def load_weights(self, exported: ExportedWeights) -> None:
        await self.engine.load_weights(exported)

    async def join_weight_group(self, rendezvous: Rendezvous, first_rank: int) -> str:
        """Join with all ranks of the engine. Returns what went wrong; empty if nothing did, here and below."""
        return await self._tried("join_weight_group", rendezvous.host, rendezvous.port, rendezvous.size, first_rank)

    async def receive_weights(self, packed: bytes, ticket: bytes) -> str:
        """Receive a bucket that the trainer sends to the group, for `load_weights`."""
        return await self._tried("receive_bucket", packed, ticket)

    async def leave_weight_group(self) -> str:
        return await self._tried("leave_weight_group")

    async def enter(self, phase: Phase) -> None:
        await self.engine.enter(phase)

    async def shutdown(self) -> None:
        """End the engine's process, all episodes and the environment's connections; may be called if `start` did not
        finish.
        """
        if hasattr(self, "engine"):
            self.engine.shutdown()
        await self.abandon()
        if hasattr(self, "environment"):
            await self.environment.close()

    async def _tried(self, method: str, *args: object) -> str:
        try:
            answers = await self.engine.on_ranks(method, *args)
        except EngineDied:
            raise
        except Exception as error:  # of vLLM, with what a rank has raised
            return in_words(error)
        return next(filter(None, answers), "")

    async def _play(self, request: EpisodeRequest, pause: Pause) -> Trajectory:
        try:
            with pause.ends():
                await self._places.acquire()
        except Interrupted:
            return request.begun or Trajectory(request.group_id, request.prompt)
        try:
            return await self._run(request, pause)
        finally:
            self._places.release()

    async def _run(self, request: EpisodeRequest, pause: Pause) -> Trajectory:
        sampler = WatchedSampler(self.engine, self._in_engine)
        sampling = sampling_of(self.config, request.mode)
        among = (sampler, self.environment, self.tokenizer, sampling, self.limits)
        place = f"group {request.group_id} ({request.prompt.data_source})"
        try:
            with self._in_episodes():
                played = await run_episode(request.prompt, request.group_id, *among, request.seed, request.begun, pause)
                if not played.num_turns:  # no room for a turn; otherwise the turns have set it
                    played.weight_version = self.engine.weight_version
                return played
        except VerlError as error:
            # The class stays: by it the driver sees whether an engine has died, without which it can go on.
            raise type(error)(f"{place}: {error}") from error
        except Exception as error:
            raise RolloutError(f"{place}: {in_words(error)}") from error


def build_engine(
    config: Config, max_model_len: int, device: str, gets_weights: bool = False, number: int = 0
) -> VLLMEngine:
    """The engine that the config describes, for sequences of up to `max_model_len` tokens; see `settings_of`."""
    from verl.rollout.engine import VLLMEngine  # takes seconds, and a driver that only starts workers does not need it

    return VLLMEngine(settings_of(config, max_model_len, device, gets_weights, number))


def settings_of(
    config: Config, max_model_len: int, device: str, gets_weights: bool = False, number: int = 0
) -> EngineSettings:
    """The settings of an engine for the config. `gets_weights`: a trainer sends it weights before it samples, so that
    by default it reads none. A quantized model is read: it has scales that no trainer sends. An engine that gets none
    reads them, though the settings of its model's run may say `dummy`.

    `number` counts the engines that a run starts, restarted ones too: each has a seed of its own, for requests without.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    load_format = rollout.load_format or "auto"
    if rollout.load_format is None and gets_weights:
        read = getattr(load_model_config(model.path, model.trust_remote_code), "quantization_config", None)
        load_format = DUMMY if read is None else "auto"
    if load_format == DUMMY and not gets_weights:
        load_format = "auto"
    # An engine without a trainer, as of an evaluation, is alone, however many a run would have.
    engines_here = placement_of(config, "cpu").most_engines_on_a_node if gets_weights and device == "cpu" else 1
    return EngineSettings(
        model.path,
        max_model_len=max_model_len,
        dtype=_number_format(config, device),
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        tensor_parallel_size=ranks_per_engine(config, device),
        seed=(config.trainer.seed + number * SPREAD) % 2**32,  # NumPy, which vLLM seeds too, takes no larger one
        num_threads=rollout.num_threads or engine_threads(engines_here),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        load_format=load_format,
        device=device,
        trust_remote_code=model.trust_remote_code,
        sleep_mode=rollout.free_cache_engine and config.trainer.layout == "colocated",
        batch_invariant=config.trainer.deterministic and device == "cuda",
    )


def _number_format(config: Config, kind: str) -> str:
    """The name of an engine's number format. A model that only vLLM can read counts as a large one."""
    device = resolve_device(kind) if kind == "auto" else torch.device(kind)
    name, num_params = config.actor_rollout_ref.rollout.dtype, LEAST_IN_BFLOAT16
    if device.type == "cpu" and name == "bfloat16" and not cpu_has_bfloat16():
        logger.warning(
            "actor_rollout_ref.rollout.dtype=bfloat16: this CPU has no instructions for it, so that sampling takes "
            "several times as long as in float32; auto would choose that"
        )
    # What `auto` chooses on such a CPU depends on the size of the model.
    if device.type == "cpu" and name == "auto" and cpu_has_bfloat16():
        from verl.engine.files.loading import policy_shape  # takes seconds, and nothing else here needs it

        with contextlib.suppress(ConfigError):
            num_params = policy_shape(config).num_params
    return str(resolve_engine_dtype(device, name, num_params)).removeprefix("torch.")


def ranks_per_engine(config: Config, device: str) -> int:
    """GPUs of one engine. On CPU an engine is one process, which uses threads instead of ranks."""
    return config.actor_rollout_ref.rollout.tensor_model_parallel_size if device == "cuda" else 1
