"""A program that a sweep can run: it leaves metrics as a training does, and ends as the file `orders` says.

A line of the file `started` has the run's seed, its name (`trainer.overwrite` of a warm start, which has no name) and
`trainer.resume_mode`. `orders` in the working folder has a line `SEED fail` or `SEED wait` for the seeds that do not
just finish.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from program_end import exit_status
from verl.config import Config, load_config_from_argv
from verl.config.loading.command_line import load_from_argv
from verl.config.loading.run import load_sft_config
from verl.config.sections.schema import SftConfig
from verl.process.interrupts import heed_interrupts
from verl.tracking.tracker import CONFIG_FILE, settings_text


def run() -> None:
    heed_interrupts()
    config: Config | SftConfig
    if "sft" in sys.argv:  # --config-name sft
        config = load_from_argv(SftConfig, load_sft_config, sys.argv[1:], "sft")
        name: str = config.trainer.overwrite
    else:
        config = load_config_from_argv(sys.argv[1:])
        name = config.trainer.experiment_name
    folder, seed = Path(config.trainer.default_local_dir), config.trainer.seed
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(settings_text(asdict(config)))
    with Path("started").open("a") as file:
        file.write(f"{seed} {name} {config.trainer.resume_mode}\n")
    orders = dict(line.split() for line in Path("orders").read_text().splitlines()) if Path("orders").exists() else {}
    order = orders.get(str(seed))
    if order == "wait":
        time.sleep(600)
    records = [{"step": 0, "val/test_score/mean": 0.0}, {"step": 7, "val/test_score/mean": 1.0 + seed}]
    lines = records[:1] if order == "fail" else records
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if order == "fail":
        sys.exit(3)


if __name__ == "__main__":
    sys.exit(exit_status(run, "interrupted here"))
