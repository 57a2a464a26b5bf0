"""The run folder: what checkpoints take, and folders and disks that cannot hold them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT
from preflight_run import small_run

from verl.config import Config
from verl.trainer.dry_run.gpus import GIB
from verl.trainer.model_shape import ModelShape
from verl.trainer.preflight import disk
from verl.trainer.preflight.models import Models

MODELS = Models(ModelShape(GIB, 2, 4, 8, 2, 1024))
# Disks of its own, which end with the shell: in the folders `small`, `full` and `read_only` of $1. Then a command.
DISKS = """
cd "$1" && mkdir small full read_only
mount -t tmpfs -o size=2m tmpfs small
mount -t tmpfs -o size=1m tmpfs full && { cat /dev/zero >full/zeros || true; }
mount -t tmpfs -o ro tmpfs read_only
cd "$OLDPWD" && shift && exec "$@"
"""
NAMESPACE = ("unshare", "--map-root-user", "--mount")
RUNS = """
import sys
from verl.trainer.main_ppo import main
folder, settings = sys.argv[1], sys.argv[2:]
for name in ("small", "full", "read_only"):
    print(name, main([*settings, f"trainer.default_local_dir={folder}/{name}/run"]))
"""


def test_what_checkpoints_take(make_config: Callable[..., Config]) -> None:
    config = make_config("trainer.save_freq=10", "trainer.max_ckpt_to_keep=3")
    # 4 GiB exported, 12 GiB of state; of 4 or more saves 3 are kept, and the best, and one is being written.
    assert disk.checkpoint_bytes(config, MODELS, steps=100) == (5 * 16 * GIB, 5)
    assert disk.checkpoint_bytes(config, MODELS, steps=20) == (2 * 16 * GIB, 2)
    assert disk.check_all_checkpoints(config, MODELS, 100, free=80 * GIB).level == "ok"
    assert disk.check_all_checkpoints(config, MODELS, 100, free=79 * GIB).level == "FAIL"
    assert disk.check_one_checkpoint(config, MODELS, free=16 * GIB).level == "ok"
    assert disk.check_one_checkpoint(config, MODELS, free=16 * GIB - 1).level == "FAIL"
    with_anchor = Models(MODELS.policy, anchor=MODELS.policy)
    moving = make_config("trainer.save_freq=10", "algorithm.ref_policy_ema_tau=0.9", "algorithm.use_kl_in_reward=True")
    assert disk.checkpoint_bytes(moving, with_anchor, 10)[0] == 24 * GIB
    assert disk.check_one_checkpoint(make_config("trainer.val_only=true"), MODELS, free=0).level == "ok"


def test_what_checkpoints_with_adapters_take(make_config: Callable[..., Config]) -> None:
    """Of 1 G parameters 1 M are trained: 4 GiB and 4 MiB exported, 12 MiB of state, and no anchor of its own."""
    adapted = Models(ModelShape(GIB, 2, 4, 8, 2, 1024, num_adapted=2**20))
    config = make_config("trainer.save_freq=10", "actor_rollout_ref.model.lora_rank=8")
    assert disk.checkpoint_bytes(config, adapted, steps=10) == (4 * GIB + 16 * 2**20, 1)


def test_run_folder(tmp_path: Path) -> None:
    assert disk.check_folder(tmp_path / "a" / "b").level == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert disk.check_folder(tmp_path / "file" / "run").level == "FAIL"


def test_no_training_starts_without_room(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own")
    settings = small_run(prompt_file, tmp_path, tiny_model_dir, "retriever.url=http://127.0.0.1:1/retrieve")
    done = subprocess.run(
        [*NAMESPACE, "bash", "-ec", DISKS, "-", tmp_path, sys.executable, "-c", RUNS, tmp_path, *settings],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["small 2", "full 2", "read_only 2"], done.stderr
    small, full, read_only = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    # 324864 parameters, in float32: exported, weights, two moments.
    assert small.startswith(f"error: disk: {tmp_path}/small/run: 2.0 MiB free, one checkpoint takes 5.0 MiB; free some")
    assert full.startswith(f"error: run folder: {tmp_path}/full/run: [Errno 28] No space left on device")
    assert read_only.startswith(f"error: run folder: {tmp_path}/read_only/run: [Errno 30] Read-only file system")
    assert "Traceback" not in done.stderr
