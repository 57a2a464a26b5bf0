"""A vLLM engine that continues token ids: token ids in, the ids as sampled and their log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import math
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import vllm
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from verl.agent.environment import INTERRUPTED, Generation, Sampling
from verl.errors import (
    ConfigError,
    DeviceOutOfMemory,
    EngineDied,
    NumericalError,
    RolloutError,
    VerlError,
    WeightSyncError,
)
from verl.phases import RESIDENT, Part, Phase
from verl.process.storage import OwnedFolder, folder_for_sockets
from verl.rollout.engine_settings import (
    DUMMY,
    EngineOutput,
    EngineSettings,
    engine_args,
    engine_variables,
    preload_variable,
)
from verl.rollout.turn_scheduler import BEGUN, INTERRUPT, STOP
from verl.weight_sync.buckets import ExportedWeights

T = TypeVar("T")

HEALTH_S = 1.0  # between checks that a process which owes an answer is alive
SHUTDOWN_S = 2.0  # grace for the engine's process before it is killed
TAGS = {Part.ENGINE_WEIGHTS: "weights", Part.KV_CACHE: "kv_cache"}  # vLLM's names, in the order of waking
# What vLLM says when its memory is too small for the model, or for one sequence.
NO_MEMORY = (
    "OutOfMemoryError",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
)
SOCKET_NAME = f"{8 * 'x'}/{uuid.UUID(int=0)}"  # behind the prefix: what makes it unique, and vLLM's name of a socket
TEMPORARY_PREFIX = "verl-vllm-"  # short, because socket paths must be


class VLLMEngine:
    """Implements `verl.agent.environment.StreamingSampler` with one vLLM engine in a child process.

    Log-probs are those of the distribution that was sampled from: after temperature, top-k and top-p. For a greedy
    request (temperature 0) they are those of the model at temperature 1. With float32 weights on CPU and a seed per
    request, the ids and the log-prob bits of a request do not depend on what else is in the batch.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._on_cpu = _is_cpu(settings.device)
        self._sleep_mode = settings.sleep_mode and not self._on_cpu
        self._request_numbers = itertools.count()
        self.weight_version = 0
        self._awake = frozenset(TAGS)
        self._has_weights = settings.load_format != DUMMY
        self._sleep_level = settings.sleep_level
        self._has_answered = False
        self._expected: tuple[int, int] | None = None  # the next version and bucket, within a version
        args = engine_args(settings, self._on_cpu)
        variables = engine_variables(settings, self._on_cpu)
        # The engine never removes what it puts into the temporary folder (sockets, a rendezvous file).
        self._temporary = OwnedFolder(TEMPORARY_PREFIX, folder_for_sockets(f"{TEMPORARY_PREFIX}{SOCKET_NAME}"))
        variables["VLLM_RPC_BASE_PATH"] = str(self._temporary.path)
        if self._on_cpu:  # on a GPU its compiler caches kernels there, which the next engine uses
            variables["TMPDIR"] = str(self._temporary.path)
            variables |= preload_variable(Path(vllm.__file__).parents[1], self._temporary.path)
        self._output = EngineOutput()
        try:
            with _environment(variables), _main_module("verl.rollout.engine_process"):
                self._running: AsyncLLM | None = AsyncLLM.from_engine_args(args)
        except BaseException as error:
            self._temporary.remove()
            if not isinstance(error, Exception):
                raise
            raise _not_started(settings.model_path, self._output.explain(error)) from error
        # vLLM asks for it in every request, and transformers looks it up in the vocabulary each time.
        tokenizer: Any = self._llm.get_tokenizer()
        vars(tokenizer)["eos_token_id"] = tokenizer.eos_token_id

    async def start(self) -> None:
        """Tie the engine's process to this one, so that it cannot outlive it. Optional; once, before the first use.

        On a CPU it also makes sampling faster, with the same ids.
        """
        await self.on_ranks("join_run", os.getpid())
        if self._on_cpu:
            await self.on_ranks("speed_up_cpu")

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. A stop string and an end-of-sequence token are part of the result.

        The last token may reach past a stop string when the tokenizer merged the two: ids are given as sampled.
        Raises `RolloutError` when the engine refuses the request, `EngineDied` when it has died, `NumericalError` for a
        NaN log-prob.
        """
        params = _sampling_params(sampling, RequestOutputKind.FINAL_ONLY)
        (completion,) = [out async for out in self._complete(ids, params)]
        return _generation(completion, self.weight_version)

    async def stream(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Generation, None]:
        """What `generate` returns, piece by piece as it is sampled; see `verl.agent.environment.StreamingSampler`."""
        params = _sampling_params(sampling, RequestOutputKind.DELTA)
        async with contextlib.aclosing(self._complete(ids, params)) as completions:
            async for completion in completions:
                yield _generation(completion, self.weight_version)

    async def interrupt(self) -> None:
        """End every turn that is being sampled after its next token; its generation is what was sampled so far.

        A request that is still on its way to the engine may be missed: call it again while a turn is awaited.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={INTERRUPT: True})
        async for _ in self._complete((0,), params):
            pass

    async def check(self) -> None:
        """Raise `EngineDied` when the engine has died, `RolloutError` when it was shut down."""
        with self._death_explained():
            await self._llm.check_health()

    @property
    def num_running(self) -> int:
        """Number of requests that are running or waiting."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    @property
    def whole_sequences(self) -> float:
        """Number of sequences of `max_model_len` tokens that fit into the key-value cache."""
        return self._llm.vllm_config.cache_config.kv_cache_max_concurrency or 1.0

    async def _complete(self, ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[CompletionOutput, None]:
        """The outputs of one request, which is aborted when this generator is closed or cancelled."""
        self._require_weights()
        request_id = str(next(self._request_numbers))
        if not self._has_answered:  # the first request asks for this, and vLLM remembers it
            await self._answer(self._llm.get_supported_tasks())
            self._has_answered = True
        outputs = self._llm.generate(tokens_input(list(ids)), params, request_id)
        try:
            with self._death_explained():
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        yield output.outputs[0]
        except EngineDied:
            raise
        except Exception as error:
            # vLLM raises an error without a message; what has happened is its cause.
            cause = error.__cause__ or error
            raise RolloutError(
                f"sampling from a context of {len(ids)} tokens failed: {type(cause).__name__}: {cause}"
            ) from error

    async def load_weights(self, exported: ExportedWeights) -> None:
        """Load a bucket of new weights; the buckets of a version must come in order, while no request is running.

        Between the first bucket and the last one the engine does not sample. Raises `WeightSyncError` when the bucket
        is wrong or could not be loaded; if nothing of the version was loaded by then, the engine is unchanged, else it
        cannot be used any more.
        """
        index, count = exported.index, exported.count
        what = f"weights version {exported.version}" + f", bucket {index + 1} of {count}" * (count > 1)
        # The bucket has to be the first one of a version, or the next one of the version that is being loaded.
        if self._expected != ((exported.version, index) if index else None):
            raise WeightSyncError(f"{what}: an earlier load broke off half-way; start a new engine to sample again")
        # Until the version is complete, the engine has no weights that it could sample from.
        had_weights, self._has_weights, self._expected = self._has_weights, False, (exported.version, index + 1)
        refused = await self._load(exported, what)
        if index == 0 and all(refused):  # no rank loaded any of it
            self._has_weights, self._expected = had_weights, None
        _require_accepted(what, refused)
        if index + 1 == count:
            self._expected = None
            await self._loaded(exported.version)

    async def _load(self, exported: ExportedWeights, what: str) -> list[list[str]]:
        """Load the bucket on all ranks; returns what each of them found wrong with it."""
        sums = (dict(exported.exports), dict(exported.sums))
        try:
            return await self.on_ranks("load_bucket", *sums, exported.index, exported.count)
        except EngineDied:
            raise
        except Exception as error:
            raise WeightSyncError(f"{what}: the engine could not load them: {error}") from error

    async def on_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WeightSyncExtension` on the engine's ranks. Returns their answers. Raises `EngineDied`."""
        return await self._answer(self._llm.collective_rpc(method, args=args))

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer of the engine's process: vLLM waits for ever if it dies meanwhile. Raises `EngineDied`."""
        waiting = asyncio.ensure_future(call)
        with self._death_explained():
            try:
                while not (await asyncio.wait([waiting], timeout=HEALTH_S))[0]:
                    await self._llm.check_health()
                return waiting.result()
            finally:
                waiting.cancel()

    async def _loaded(self, version: int) -> None:
        """Record new weights that all ranks of the engine have loaded."""
        if not await self._answer(self._llm.reset_prefix_cache()):
            raise WeightSyncError(f"weights version {version}: requests were still running while weights were loaded")
        self.weight_version = version
        self._has_weights = True

    async def enter(self, phase: Phase) -> None:
        """Keep in GPU memory what `verl.phases` lists for an engine. Does nothing on CPU, or without `sleep_mode`.

        Weights that leave go to host memory if the engine has read any from files, and are dropped otherwise. The
        engine cannot sample until new ones are loaded in `Phase.SYNC`.
        """
        if not self._sleep_mode:
            return
        wanted = RESIDENT[phase].intersection(TAGS)
        # vLLM can wake single parts, but only put all of them to sleep: what should stay is woken again below. Before
        # new weights the old ones go, too, even if they could stay.
        if self._awake and (phase is Phase.SYNC or not self._awake <= wanted):
            self._awake, self._has_weights = frozenset(), False
            await self._answer(self._llm.sleep(level=self._sleep_level))
        if phase is Phase.SAMPLE:
            self._require_weights()
        for part, tag in TAGS.items():
            if part in wanted - self._awake:
                await self._answer(self._llm.wake_up(tags=[tag]))
                self._awake |= {part}

    @contextlib.contextmanager
    def _death_explained(self) -> Iterator[None]:
        """Raise `EngineDied`, with what the engine's process printed, in place of vLLM's error for its death."""
        try:
            yield
        except EngineDeadError as error:
            told = self._output.explain(error)
            raise EngineDied(f"the engine's process has died; start a new engine to sample again. {told}") from error

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise WeightSyncError("the engine has no complete weights: load some before it samples again")

    def shutdown(self) -> None:
        """End the engine's process. Safe to call twice."""
        llm, self._running = self._running, None
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_S)
            self._temporary.remove()

    @property
    def _llm(self) -> AsyncLLM:
        if self._running is None:
            raise RolloutError("the engine was shut down; start a new one to sample again")
        return self._running


def _not_started(model_path: str, told: str) -> VerlError:
    """The error for an engine that did not start; without memory it would not start again either."""
    what = f"an engine for {model_path} did not start"
    if any(sign in told for sign in NO_MEMORY):
        return DeviceOutOfMemory(
            f"{what}: its device has too little memory. Change actor_rollout_ref.rollout.gpu_memory_utilization (the "
            "engine's share; on a CPU kv_cache_gib), shorten sequences (data.max_*), or spread an engine over more "
            f"GPUs (rollout.tensor_model_parallel_size). {told}"
        )
    return RolloutError(f"{what}. {told}")


def _require_accepted(what: str, refused: Sequence[Sequence[str]]) -> None:
    """Raise `WeightSyncError` when a rank of the engine refused the bucket."""
    for rank, reasons in enumerate(refused):
        if reasons:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            raise WeightSyncError(f"{what}: the engine's rank {rank} found {reasons[0]}{more}")


def _is_cpu(device: str) -> bool:
    """Whether engines run on CPU, which the installed build of vLLM decides; `device` must agree with it."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if device not in ("auto", "cpu" if on_cpu else "cuda"):
        built_for, needed = ("cpu", "gpu") if on_cpu else (current_platform.device_type, "cpu")
        unseen = "" if on_cpu else "; if torch should see a GPU here, bash scripts/setup.sh --gpu says why it does not"
        raise ConfigError(
            f"device={device}, but the installed vLLM is built for {built_for}; "
            f"set trainer.device=auto, or install requirements/{needed}.lock{unseen}"
        )
    return on_cpu


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Context in which child processes get the variables; it restores the environment, also what vLLM changed."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _main_module(name: str) -> Iterator[None]:
    """Context in which a process that is spawned has this main module, and not the program that this process runs."""
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, importlib.util.find_spec(name)
    try:
        yield
    finally:
        main.__spec__ = before


def _sampling_params(sampling: Sampling, output_kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        extra_args={STOP: list(sampling.stop), BEGUN: sampling.num_begun},
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        seed=sampling.seed,
        detokenize=False,  # a turn consists of ids
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,
        output_kind=output_kind,
        skip_clone=True,
    )


def _generation(completion: CompletionOutput, weight_version: int) -> Generation:
    """The generation of a whole turn, or of a piece, which has a stop reason only if it is the last."""
    if completion.finish_reason not in (None, "stop", "length"):
        raise RolloutError(f"the engine ended a request with '{completion.finish_reason}'")
    log_probs = tuple(completion.logprobs.logprobs)
    if not math.isfinite(sum(log_probs)):
        raise NumericalError(f"the engine returned a log-prob that is not finite, for ids {completion.token_ids}")
    reason = INTERRUPTED if completion.stop_reason == INTERRUPT else completion.finish_reason or ""
    return Generation(tuple(completion.token_ids), log_probs, reason, weight_version)
