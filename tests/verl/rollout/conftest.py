"""One engine for all tests of this folder: starting one takes about ten seconds."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class EngineSession:
    """An engine with the event loop that it lives on."""

    def __init__(self, model_dir: Path) -> None:
        from verl.rollout.engine import VLLMEngine

        self.runner = asyncio.Runner()
        self.engine = VLLMEngine(
            str(model_dir), dtype="float32", max_model_len=512, kv_cache_gib=0.125, num_threads=1, max_num_seqs=64
        )
        self.run(self.engine.start())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def close(self) -> None:
        self.engine.shutdown()
        self.runner.close()


@pytest.fixture(scope="session")
def session(tiny_model_dir: Path) -> Iterator[EngineSession]:
    session = EngineSession(tiny_model_dir)
    yield session
    session.close()


@pytest.fixture
def weight_dir() -> Iterator[Path]:
    """A folder for published weights, in shared memory where there is one."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="verl-test-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)
