from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replay_world import Replay


@pytest.fixture
def replay(byte_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> Replay:
    return Replay(byte_tokenizer, tiny_model_dir, tmp_path)
