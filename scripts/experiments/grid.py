"""Train every run of an experiment, with every seed, and write its table and figure.

.venv/bin/python scripts/experiments/grid.py scripts/experiments/algorithms.yaml [--seeds 3,4,5] [--jobs 2] [--steps N]

Finished runs are kept and the others start anew (what they left goes to archive/ in their folder), so the same command
continues after an interruption. Per seed it makes the data and a warm-started policy (once, for all experiments) and
keeps one retrieval server.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from collect import publish, write_results
from experiment import SFT_CONFIG, Run, World, add_options, positive, read_experiment
from processes import Job, retrieval_server, run_all

from verl.config import check_supported
from verl.errors import VerlError

PYTHON = sys.executable


def main() -> int:
    """Returns the exit status: 0 all runs are finished, 1 some failed, 130 interrupted."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        experiment = read_experiment(options.experiment, options.seeds, options.steps)
        output_dir = options.output_dir or Path("runs") / experiment.name
        runs = experiment.runs(output_dir, options.worlds_dir)
        for run in runs:
            check_supported(run.config)
        if options.dry_run:
            print("\n".join(f"{run.name}: {run.why_unfinished() or 'finished'}" for run in runs))
            return 0
        train([run for run in runs if run.why_unfinished()], options.jobs)
        table = write_results(experiment, runs, output_dir)
    except (VerlError, ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, the same command continues with the others", file=sys.stderr)
        return 130
    print(f"results: {publish(table) if options.publish else table}")
    unfinished = [reason for run in runs if (reason := run.why_unfinished())]
    print("\n".join(f"not finished: {reason}" for reason in unfinished), end="\n" if unfinished else "")
    return 1 if unfinished else 0


def train(runs: Sequence[Run], at_once: int) -> None:
    """Prepare the worlds that the runs need, then train. A run that fails, or whose world does, stops no other."""
    worlds = list(dict.fromkeys(run.world for run in runs))
    warm_up([world for world in worlds if not world.policy.is_dir()], at_once)
    with ExitStack() as servers:
        urls = {
            world: servers.enter_context(
                retrieval_server(world.folder / "data" / "corpus.jsonl", world.folder / "retrieval.log")
            )
            for world in worlds
            if world.policy.is_dir()
        }
        run_all([training(run, urls[run.world]) for run in runs if run.world in urls], at_once)


def warm_up(worlds: Sequence[World], at_once: int) -> None:
    """Make data and policy of each world from the beginning."""
    without_data = {job.name for job in run_all([make_data(world) for world in worlds], at_once)}
    run_all([warm_start(world) for world in worlds if make_data(world).name not in without_data], at_once)


def make_data(world: World) -> Job:
    options = ["--output_dir", f"{world.folder}/data", "--seed", str(world.seed)]
    command = [PYTHON, "-m", "search_r1.data.tinywiki", *options, *world.options]
    return Job(f"data, seed {world.seed}", command, world.folder / "data.log")


def warm_start(world: World) -> Job:
    command = [PYTHON, "-m", "verl.trainer.sft", "--config-name", SFT_CONFIG]
    overrides = [
        f"data.train_files={world.folder}/data/sft.parquet",
        f"model.path={world.folder}/data/policy_init",
        f"trainer.default_local_dir={world.folder}/sft",
        "trainer.overwrite=archive",
        f"trainer.seed={world.seed}",
    ]
    return Job(f"warm start, seed {world.seed}", [*command, *overrides], world.folder / "sft.log")


def training(run: Run, retriever_url: str) -> Job:
    command = [PYTHON, "-m", "verl.trainer.main_ppo", "--config-name", run.config_name, *run.overrides(retriever_url)]
    return Job(run.name, command, run.folder / "train.log")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train every run of an experiment and write its table and figure.")
    add_options(parser)
    parser.add_argument("--jobs", type=positive, default=2, help="trainings at a time, each takes one core")
    parser.add_argument("--dry_run", action="store_true", help="check all settings and say which runs are finished")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
