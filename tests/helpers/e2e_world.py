"""Running the project's commands as a user does."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Of the processes that start the first Ray on a machine at the same time each would write a token for all to read.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ["RAY_ADDRESS"] = "local"  # a cluster that somebody started on this machine is not for tests
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}

_held_ports: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that binds it with SO_REUSEADDR, as servers do; until it listens, connections are refused.

    It stays bound by this process, so that the kernel gives it to nobody else in the meantime.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held_ports.append(holder)
    return int(holder.getsockname()[1])


def wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    """Until `url` answers; on a busy machine a server takes minutes to load."""
    deadline = time.monotonic() + 600
    while True:
        assert server.poll() is None, f"the server of {url} ended with {server.returncode}"
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError as error:
            assert time.monotonic() < deadline, f"{url} is not there after ten minutes: {error}"
            time.sleep(0.1)


def run(*command: str, timeout: float = 1800) -> str:
    """Run a Python module or script of the project; its output, or an assertion error that shows it."""
    return run_and_listen(*command, timeout=timeout).stdout


def run_and_listen(*command: str, timeout: float = 1800, **variables: str) -> subprocess.CompletedProcess[str]:
    """Like `run`, with more environment variables; what came on standard error is in the result too."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENV | variables, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


@contextmanager
def signals_as_they_were() -> Iterator[None]:
    """What a program does about signals in this process ends with it."""
    numbers, hook = (signal.SIGINT, signal.SIGTERM), sys.unraisablehook
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def run_here(*command: str, **more: Any) -> int:
    """The exit status of `-m MODULE ARGUMENTS` in this process; `more` is for the module's `main`.

    It saves the time that a process of its own takes to import everything and, with `ray_session`, to start a Ray.
    """
    option, module, *arguments = command
    assert option == "-m"
    with signals_as_they_were():
        return importlib.import_module(module).main(arguments, **more)


# So that there is a gradient where all of so weak a policy's rewards are 0.
GRADIENT = ("actor_rollout_ref.actor.entropy_coeff=0.01",)


def small_run(tinywiki: Path, policy: Path, url: str, folder: Path, *overrides: str) -> tuple[str, ...]:
    """The command of a run with 24 trajectories a step: 4 of each of 6 prompts."""
    return (
        *("-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", f"data.train_files={tinywiki / 'train.parquet'}"),
        *(f"data.val_files={tinywiki / 'validation.parquet'}", "data.val_data_num=32", "data.train_batch_size=6"),
        *(f"actor_rollout_ref.model.path={policy}", f"retriever.url={url}", f"trainer.default_local_dir={folder}"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=24", "actor_rollout_ref.rollout.n_agent=4"),
        *(*GRADIENT, *overrides),
    )


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}
