"""Running the project's commands as a user does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*command: str, timeout: float = 600) -> str:
    """Run a Python module or script of the project; its output, or an assertion error that shows it."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
