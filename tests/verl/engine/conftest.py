from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine_cases
import pytest
import torch
import torch.distributed as dist

from verl.engine.device.runtime import init_process_group


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    meeting = tmp_path_factory.mktemp("group") / "store"
    init_process_group(0, 1, f"file://{meeting}", engine_cases.CPU)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engine_cases.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engine_cases.write_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
