"""One engine for all tests of this folder: starting one takes about ten seconds."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch.multiprocessing as mp
from memory_by_name import share_by_name

from verl.agent.environment import Generation, Sampling
from verl.rollout.weight_stream import WeightStream

T = TypeVar("T")


class EngineSession:
    """An engine with the event loop that it lives on, and the temporary folder that it is given."""

    def __init__(self, model_dir: Path, temporary: Path, load_format: str = "auto") -> None:
        from verl.rollout.engine import VLLMEngine
        from verl.rollout.engine_settings import EngineSettings

        self.temporary = temporary
        self.runner = asyncio.Runner()
        with patch.object(tempfile, "tempdir", str(temporary)):
            settings = EngineSettings(
                str(model_dir),
                dtype="float32",
                max_model_len=512,
                kv_cache_gib=0.125,
                num_threads=1,
                max_num_seqs=64,
                load_format=load_format,
            )
            self.engine = VLLMEngine(settings)
        self.run(self.engine.start())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def generate(self, ids: Sequence[int], **how: Any) -> Generation:
        return self.run(self.engine.generate(ids, Sampling(**how)))

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generation]:
        """All at once."""

        async def sample() -> list[Generation]:
            calls = [self.engine.generate(ids, how) for ids, how in zip(prompts, sampling, strict=True)]
            return await asyncio.gather(*calls)

        return self.run(sample())

    def load(self, stream: WeightStream) -> None:
        for bucket in stream.buckets:
            self.run(self.engine.load_weights(bucket))

    def close(self) -> None:
        self.engine.shutdown()
        self.runner.close()


@pytest.fixture(scope="session")
def session(tiny_model_dir: Path) -> Iterator[EngineSession]:
    with tempfile.TemporaryDirectory() as temporary:  # not pytest's, whose path is too long for a socket
        session = EngineSession(tiny_model_dir, Path(temporary))
        yield session
        session.close()
        assert not list(Path(temporary).iterdir()), "the engine has left something in the temporary folder"


@pytest.fixture
def weight_dir() -> Iterator[Path]:
    """A folder for published weights, in shared memory where there is one."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="verl-test-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def memory_by_name() -> Iterator[None]:
    before = mp.get_sharing_strategy()
    share_by_name()
    yield
    mp.set_sharing_strategy(before)
