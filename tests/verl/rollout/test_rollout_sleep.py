"""How engines leave and take GPU memory around a sync: the real manager and engine, stand-ins for calls of CUDA."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from verl.agent.environment import Sampling
from verl.config import load_config
from verl.errors import WeightSyncError
from verl.phases import Phase
from verl.rollout.engine import VLLMEngine
from verl.rollout.engine_settings import DISCARD, KEEP, EngineSettings
from verl.rollout.fleet import Engine, EngineLocation, Fleet
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_stream import WeightStream
from verl.rollout.worker import RolloutWorker
from verl.single_controller import ResourcePool
from verl.weight_sync.buckets import ExportedWeights


class RecordingLLM:
    """Takes what `AsyncLLM` takes, by its own signatures, and notes it."""

    def __init__(self, calls: list[str], refuses: str) -> None:
        self.calls, self.refuses = calls, refuses

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from vllm.v1.engine.async_llm import AsyncLLM

        signature = inspect.signature(getattr(AsyncLLM, name))

        async def call(*args: Any, **options: Any) -> Any:
            given = signature.bind(self, *args, **options).arguments
            shown = {key: value for key, value in given.items() if key in ("level", "tags", "method")}
            self.calls.append(f"{name} {next(iter(shown.values()), '')}".strip())
            if name != "collective_rpc":
                return True
            _, sums, *_ = given["args"]
            return [[f"other values in {key} than the trainer wrote" for key in sums if key == self.refuses]]

        return call


def engine_on_a_gpu(
    calls: list[str], sleep_mode: bool = True, refuses: str = "changed", load_format: str = "dummy"
) -> VLLMEngine:
    """An engine whose process is a stand-in; started on CPU it would have no memory to leave."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._sleep_mode, engine._sleep_level = (
        sleep_mode,
        EngineSettings("model", 1024, load_format=load_format).sleep_level,
    )
    engine._expected = None
    engine._awake, engine._has_weights = frozenset(VLLM_PARTS), True
    engine._running = RecordingLLM(calls, refuses)  # type: ignore[assignment]
    engine.weight_version = 0
    return engine


class LocalFleet(Fleet):
    """One worker in this process, that has one GPU."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.worker = RolloutWorker.__new__(RolloutWorker)
        self.worker.engine = engine
        self.engines = [Engine(self.worker, EngineLocation(ResourcePool(1, 1, "cuda"), 0), None)]
        self.takes_turns = False  # as if its start had been waited for

    def renew(self) -> None: ...

    def ask(self, method: str, *args: Any) -> None:
        asyncio.run(getattr(self.worker, method)(*args))


class LocalManager(RolloutManager):
    """Of that worker."""

    def __init__(self, calls: list[str], **engine: Any) -> None:
        fleet = LocalFleet(engine_on_a_gpu(calls, **engine))
        self.worker = fleet.worker
        with patch("verl.rollout.manager.Fleet", return_value=fleet):
            super().__init__(load_config("ppo_trainer", []), ResourcePool(1, 1, "cuda"))


def publish(calls: list[str], *weights: str) -> WeightStream:
    """With one weight in each bucket."""
    weights = weights or ("right", "right")

    def buckets() -> Iterator[ExportedWeights]:
        for index, name in enumerate(weights):
            calls.append("export")
            yield ExportedWeights({}, 4, {name: 1}, index, len(weights))

    return WeightStream(buckets(), lambda: calls.append("release"))


VLLM_PARTS = ("engine weights", "kv cache")
LOADED = [
    "sleep 2",
    "wake_up ['weights']",
    *2 * ["export", "collective_rpc load_bucket"],
    "reset_prefix_cache",
    "release",
    "wake_up ['kv_cache']",
]


def test_weights_wake_first_and_the_cache_when_the_trainer_has_released_its_memory() -> None:
    calls: list[str] = []
    manager = LocalManager(calls)
    calls.clear()
    manager.sleep()
    manager.load_weights(lambda: publish(calls))
    assert calls == LOADED
    assert manager.worker.engine.weight_version == 4


def test_a_load_into_an_awake_engine_drops_its_cache_first() -> None:
    """Weights of the anchor, to validate it: the trainer's memory is needed beside the engine's weights alone."""
    calls: list[str] = []
    manager = LocalManager(calls)
    calls.clear()
    for _ in range(2):
        manager.load_weights(lambda: publish(calls))
    assert calls == 2 * LOADED


def test_what_an_engine_has_read_from_files_outlives_its_sleep() -> None:
    """A scale of a quantized model, say: no sync would bring it again."""
    calls: list[str] = []
    manager = LocalManager(calls, load_format="auto")
    calls.clear()
    manager.sleep()
    manager.load_weights(lambda: publish(calls))
    assert calls == ["sleep 1", *LOADED[1:]]


def test_an_engine_that_keeps_its_memory_is_not_put_to_sleep() -> None:
    calls: list[str] = []
    manager = LocalManager(calls, sleep_mode=False)
    calls.clear()
    manager.sleep()
    manager.load_weights(lambda: publish(calls))
    assert calls == [call for call in LOADED if "sleep" not in call and "wake" not in call]


def test_an_engine_whose_weights_are_gone_does_not_sample() -> None:
    calls: list[str] = []
    manager = LocalManager(calls, refuses="right")
    engine = manager.worker.engine
    with pytest.raises(WeightSyncError, match="version 4, bucket 1 of 2: .* rank 0 found other values in right"):
        manager.load_weights(lambda: publish(calls))
    assert calls[-1] == "release"
    with pytest.raises(WeightSyncError, match="no complete weights"):
        asyncio.run(engine.enter(Phase.SAMPLE))
    with pytest.raises(WeightSyncError, match="no complete weights"):
        asyncio.run(engine.generate([1], Sampling()))


@pytest.mark.parametrize("sleep_mode", [True, False])
def test_a_sync_that_breaks_off_half_way_leaves_no_half_new_engine_in_use(sleep_mode: bool) -> None:
    calls: list[str] = []
    manager = LocalManager(calls, sleep_mode=sleep_mode)
    engine = manager.worker.engine
    with pytest.raises(WeightSyncError, match="version 4, bucket 2 of 3: .* other values in changed"):
        manager.load_weights(lambda: publish(calls, "right", "changed", "right"))
    assert calls[-3:] == ["export", "collective_rpc load_bucket", "release"]
    with pytest.raises(WeightSyncError, match="no complete weights"):
        asyncio.run(engine.generate([1], Sampling()))
    assert engine.weight_version == 0
    with pytest.raises(WeightSyncError, match="broke off half-way; start a new engine"):
        manager.load_weights(lambda: publish(calls))


def test_a_first_bucket_that_is_refused_leaves_the_engine_as_it_was() -> None:
    calls: list[str] = []
    manager = LocalManager(calls, sleep_mode=False)
    with pytest.raises(WeightSyncError, match="bucket 1 of 2"):
        manager.load_weights(lambda: publish(calls, "changed", "right"))
    manager.worker.engine._require_weights()
    manager.load_weights(lambda: publish(calls))
    assert manager.worker.engine.weight_version == 4


def test_what_the_installed_vllm_calls_its_parts_and_levels() -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.executor.abstract import SLEEP_TAGS
    from vllm.v1.worker.gpu_worker import Worker

    from verl.rollout.engine import TAGS

    assert set(TAGS.values()) == SLEEP_TAGS  # with one more, both steps would leave it asleep
    assert list(TAGS) == list(VLLM_PARTS)
    assert f"level == {DISCARD}" in inspect.getsource(Worker.sleep)  # buffers, which no sync brings, are saved there
    assert f"level == {KEEP}" in inspect.getsource(CuMemBackend.suspend)  # and there the weights
    assert "_sleep_saved_buffers" in inspect.getsource(Worker.wake_up)
