from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from viewer_world import Episodes, write_run


@pytest.fixture(scope="session")
def episodes(byte_tokenizer: PreTrainedTokenizerFast) -> Episodes:
    return Episodes(byte_tokenizer)


@pytest.fixture(scope="session")
def river_run(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    """Read only; a test that adds files makes a run of its own."""
    return write_run(tmp_path_factory.mktemp("runs") / "rivers", episodes)
