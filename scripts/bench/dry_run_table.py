"""Dry runs of the published train scripts: the memory of each phase and the least time of a step, model by model.

    python scripts/bench/dry_run_table.py --gpus 8x80 --models tests/verl/trainer/shapes/Qwen2.5-{3B,7B}
    python scripts/bench/dry_run_table.py --gpus 32x80 --models .../Qwen2.5-72B --set tensor_model_parallel_size=4 ...

A row is a script with a model; `--set` changes a setting of all rows. Models need a config.json alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from verl.config import Config
from verl.config.loading.run import load_stored_config
from verl.phases import Phase
from verl.planning.dry_run.place import GIB, Place, parse_gpus
from verl.planning.dry_run.report import least_seconds_of_step
from verl.planning.dry_run.run import DryRun, dry_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train_grpo.sh", "train_ppo.sh", "train_grpo_ema_pg.sh")


def settings(script: str, folder: Path) -> Path:
    """The file of all settings that a script has, as the script itself says them."""
    command = ["bash", str(ROOT / script), "--cfg", "job"]
    environment = os.environ | {"BASE_MODEL": "org/model", "DATA_DIR": str(folder)}
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    path = folder / f"{script}.yaml"
    path.write_text(made.stdout)
    return path


def config_of(path: Path, model: Path, changes: list[str]) -> Config:
    critic = f"critic.model.path={model}"
    return load_stored_config(path, [f"actor_rollout_ref.model.path={model}", critic, *changes])


def row(name: str, config: Config, found: DryRun, place: Place, seconds: float) -> str:
    """One line: GiB of each phase, what is left in the largest, the least seconds of a step."""
    by_phase = {name: max(one.total for one in found.phases if one.phase is name) / GIB for name in Phase}
    left = place.memory / GIB - max(by_phase.values())
    sizes = "".join(f"{by_phase[phase]:8.1f}" for phase in Phase)
    times = [least_seconds_of_step(config, found.roles, gpu) for gpu in place.gpus]
    return f"{name:<36}{sizes}{left:8.1f}" + "".join(f"{time:9.0f}" for time in times) + f"{seconds:9.1f}"


def main() -> None:
    """Print the table, and below it what does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpus", default="8x80")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--advise", action="store_true", help="also try settings for what does not fit: takes longer")
    asked = parser.parse_args()
    place = parse_gpus(asked.gpus)
    print(f"{asked.gpus}: GPUs of {place.memory / GIB:.1f} GiB {' '.join(asked.set)}".rstrip())
    times = "".join(f"{f's {gpu.name}':>9}" for gpu in place.gpus)
    print(f"{'':<36}{''.join(f'{phase:>8}' for phase in Phase)}{'left':>8}{times}{'CPU s':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        stored = {script: settings(script, Path(folder)) for script in asked.scripts}
        for model in asked.models:
            for script, path in stored.items():
                began = time.process_time()
                config = config_of(path, model.resolve(), asked.set)
                found = dry_run(config, place, advise=asked.advise)
                print(row(f"{script} {model.name}", config, found, place, time.process_time() - began))
                if found.level != "ok":
                    print(f"    {found.level} {found.verdict}", flush=True)


if __name__ == "__main__":
    main()
