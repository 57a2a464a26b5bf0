"""Two steps of the published train_grpo.sh with a model of a published shape and random weights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil

from first_run.result import Result, skipped
from first_run.site import ROOT, Site
from first_run.training import LIMIT_S, ROLE, common, judge_run, predicted

GIB = 2**30
BILLIONS = {"tiny": 0.001, "3b": 3.1, "7b": 7.6}
ON_DISK = 18  # bytes a parameter: the model in bfloat16, a checkpoint in float32, and the state to resume from
ON_HOST = 30  # bytes a parameter: all that is off-loaded between phases, and a copy of the state while it is written
ROWS = 8  # of a micro-batch on each GPU, as in the script
SHORT = {  # for a CPU
    "data.max_response_length": 32,
    "data.max_start_length": 256,
    "data.max_obs_length": 96,
    "data.max_prompt_length": 512,
    "data.train_batch_size": 4,
    f"{ROLE}.actor.ppo_mini_batch_size": 20,
    f"{ROLE}.actor.num_threads": 1,
    f"{ROLE}.rollout.num_threads": 1,
    f"{ROLE}.rollout.max_num_seqs": 32,
    f"{ROLE}.rollout.kv_cache_gib": 0.25,
    f"{ROLE}.rollout.dtype": "float32",
}


def train(site: Site, shape: str, url: str) -> Result:
    """Needs disk and host memory; what is missing skips it."""
    if lacking := what_lacks(site.scratch, shape, psutil.virtual_memory().available):
        return skipped(lacking)
    model, run_dir = site.scratch / f"model_{shape}", site.scratch / f"run_{shape}"
    try:
        write_model(site, shape, model)
        settings = settings_of(site, run_dir, url)
        script = ["bash", str(ROOT / "train_grpo.sh"), *settings]
        prediction = predicted(site, script, variables_of(site, model, "verl.trainer.dry_run"))
        if site.on_gpu and not prediction.fits:
            return skipped(f"the dry run says: {prediction.words}")
        site.run("training", script, LIMIT_S, variables_of(site, model, "verl.trainer.main_ppo"), site.scratch)
        return judge_run(run_dir, prediction, searches=False)
    finally:
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)


def what_lacks(scratch: Path, shape: str, memory: float) -> str | None:
    """Checked before a model of many gigabytes is written."""
    needed = ON_DISK * BILLIONS[shape] * 1e9 / GIB
    if (free := shutil.disk_usage(scratch).free / GIB) < needed:
        return f"needs {needed:.0f} GiB of disk, {scratch} has {free:.0f}: --scratch ANOTHER_FOLDER"
    needed = ON_HOST * BILLIONS[shape] * 1e9 / GIB
    return f"needs {needed:.0f} GiB of host memory, {memory / GIB:.0f} are available" if memory / GIB < needed else None


def write_model(site: Site, shape: str, model: Path) -> None:
    options = ["--shape", shape, "--tokenizer", str(site.world() / "policy_init"), "--output_dir", str(model)]
    script = str(ROOT / "scripts" / "gpu" / "random_model.py")
    site.run("random_model", [sys.executable, script, *options, "--device", site.device], LIMIT_S)


def settings_of(site: Site, run_dir: Path, url: str) -> list[str]:
    """What differs from the script: fewer rows in all, but micro-batches on each GPU as large as there."""
    rows = ROWS * site.num_devices
    settings = {
        "data.train_batch_size": rows,
        f"{ROLE}.actor.ppo_mini_batch_size": rows,
        f"{ROLE}.actor.ppo_micro_batch_size": rows,
        f"{ROLE}.ref.log_prob_micro_batch_size": 2 * rows,
        f"{ROLE}.rollout.log_prob_micro_batch_size": 2 * rows,
        "agent.template": "tinywiki",
        "trainer.device": site.device,
        "trainer.save_freq": -1,
    }
    settings |= {} if site.on_gpu else SHORT
    return [*(f"{key}={value}" for key, value in settings.items()), *common(run_dir, url)]


def variables_of(site: Site, model: Path, trainer: str) -> dict[str, str]:
    name = {"EXPERIMENT_NAME": f"stage_{site.stage}", "N_GPUS": str(site.num_devices)}
    return name | {"DATA_DIR": str(site.world()), "BASE_MODEL": str(model), "TRAINER": trainer}
