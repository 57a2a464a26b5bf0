"""An engine that does not start, or dies: the error says what its process printed, and where the rest is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT

PRINTING = """
import os, subprocess, sys
print("ValueError: of an earlier engine", flush=True)
from verl.rollout.engine_settings import EngineOutput
output = EngineOutput()
for line in sys.argv[1:]:
    subprocess.run([sys.executable, "-c", "import sys; print(sys.argv[1])", line])
os.write(3, output.explain(ValueError("See root cause above")).encode())
"""
NOT_STARTED = """
import sys
from verl.errors import VerlError
from verl.rollout.engine import VLLMEngine
from verl.rollout.engine_settings import EngineSettings
if __name__ == "__main__":
    try:
        VLLMEngine(EngineSettings(sys.argv[1], max_model_len=64, kv_cache_gib=float(sys.argv[2])))
    except VerlError as error:
        open(sys.argv[3], "w").write(f"{type(error).__name__}: {error}")
"""
CORE = "(EngineCore pid=7) ERROR 11-26 19:25:51 [core.py:1510] "


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                f"{CORE}Traceback (most recent call last):",
                "(Worker_TP1 pid=9) ERROR 11-26 19:25:50 [x.py:1] torch.OutOfMemoryError: CUDA out of memory.",
                f"{CORE}Exception: WorkerProc failed. See stack trace for root cause.",
                "torch.OutOfMemoryError: CUDA out of memory.",
                f"{CORE}KeyError: 'layers.3'",
                "AssertionError",
            ],
            "torch.OutOfMemoryError: CUDA out of memory.; KeyError: 'layers.3'",
        ),
        (["the error: is in no traceback"], "ValueError: See root cause above"),
    ],
)
def test_the_first_causes_are_told_once_and_without_vllm_s_prefix(
    lines: list[str], expected: str, tmp_path: Path
) -> None:
    printed, found = tmp_path / "worker.out", tmp_path / "found"
    command = f'exec "$0" -c "$1" "${{@:2}}" >{printed} 2>&1 3>{found}'
    subprocess.run(["bash", "-c", command, sys.executable, PRINTING, *lines], cwd=ROOT, check=True, timeout=120)
    assert found.read_text() == f"vLLM says: {expected} (all that it printed is in {printed})"


def test_an_error_is_told_though_what_was_printed_is_gone(tmp_path: Path) -> None:
    """As in a long run whose logs in /tmp the system has cleaned away."""
    printed, found = tmp_path / "worker.out", tmp_path / "found"
    code = PRINTING.replace("for line", f"os.unlink({str(printed)!r})\nfor line")
    command = f'exec "$0" -c "$1" "${{@:2}}" >{printed} 2>&1 3>{found}'
    subprocess.run(["bash", "-c", command, sys.executable, code], cwd=ROOT, check=True, timeout=120)
    assert found.read_text() == "vLLM says: ValueError: See root cause above"


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("weights", "RolloutError"),
        # What differs is a table of vLLM's sentences.
        pytest.param("memory", "DeviceOutOfMemory", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_does_not_start_says_why(broken: str, error: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    if broken == "weights":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    room = "1" if broken == "weights" else "1e-5"
    script, log, told = tmp_path / "start.py", tmp_path / "worker.out", tmp_path / "told"
    script.write_text(NOT_STARTED)
    with log.open("wb") as file:
        command = [sys.executable, str(script), str(model), room, str(told)]
        paths = {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=ENV | paths, stdout=file, stderr=subprocess.STDOUT, timeout=280, check=True)
    message = told.read_text()
    assert message.startswith(f"{error}: an engine for {model} did not start") and message.endswith(f"{log})")
    assert ("SafetensorError" if broken == "weights" else "No available memory for the cache blocks") in message
