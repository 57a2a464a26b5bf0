"""`.venv/bin/python -m verl.trainer.main_ppo key=value ...`: train (or only validate) a search agent by RL.

The command line is checked before anything heavy is imported, the prompt files and the environment before any model
is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from program_end import exit_status
from verl.config import check_supported, load_config, load_config_from_argv
from verl.config.loading.command_line import is_sweep
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.placement import devices_of_nodes
from verl.process.interrupts import heed_interrupts
from verl.process.startup import leave, log_to_stderr, phase, tell
from verl.process.storage import work_without_home
from verl.run.resuming import check_start
from verl.run.run_folder import run_lock
from verl.run.saved_state import how_to_resume

if TYPE_CHECKING:
    from verl.config import Config

CONFIG_NAME = "ppo_trainer"
SWEEP_INTERRUPTED = "the same command resumes the sweep"
log = logging.getLogger(__name__)


def main(
    argv: list[str] | None = None,
    adapt: Callable[[Config], Config] = lambda config: config,
    program: str = "verl.trainer.main_ppo",
) -> int:
    """Returns the exit status, as `exit_status` says. `adapt` changes the config that the command line gave; `program`
    is run for each configuration of a sweep.
    """
    log_to_stderr()
    work_without_home()
    heed_interrupts()
    arguments = sys.argv[1:] if argv is None else argv
    if is_sweep(arguments, CONFIG_NAME):
        return exit_status(lambda: run_sweep(program, arguments, adapt), SWEEP_INTERRUPTED)

    # Known once the config is valid; before that an interrupt leaves nothing to resume.
    run_dir: Path | None = None

    def train() -> None:
        nonlocal run_dir
        config = adapt(load_config_from_argv(arguments, CONFIG_NAME))
        check_supported(config)
        tell("the config is valid")
        for warning in config_warnings(config):
            log.warning(warning)
        run_dir = Path(config.trainer.default_local_dir)
        run(config)

    return exit_status(train, lambda: how_to_resume(run_dir) if run_dir else "nothing was started")


def run_sweep(program: str, arguments: list[str], adapt: Callable[[Config], Config]) -> None:
    """Run `program` for every combination of the values that `-m` asks for."""
    from verl.config import Config
    from verl.trainer.sweep import sweep

    def load(name: str, overrides: list[str], config_dir: str | None) -> Config:
        config = adapt(load_config(name, overrides, config_dir))
        check_supported(config)
        return config

    print(f"table: {sweep(program, Config, arguments, CONFIG_NAME, load)}")


def run(config: Config) -> None:
    """Check the inputs, start Ray, train, and leave no process behind."""
    check_start(config.trainer)

    # Mistakes are found before Ray is started, which takes seconds.
    with phase("checking prompt files, reward, models and environment"):
        from verl.trainer.start_checks.inputs import check_inputs

        inputs = check_inputs(config)
        tell(f"loads {inputs.models}")

    with phase("importing Ray and the trainer"):
        import ray

        from verl.run.process_cleanup import ProcessCleanup
        from verl.single_controller import device_of_cluster
        from verl.single_controller.cluster import connect, disconnect
        from verl.trainer.ending import ending  # its curves come with matplotlib
        from verl.trainer.layout import on_nodes_that_are_there
        from verl.trainer.rl_trainer import RLTrainer
        from verl.trainer.start_checks.models import require_engines_share_heads

    # Ray, the lock of the folder and the watching process end with the run, however it ends.
    run_dir = Path(config.trainer.default_local_dir)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(run_lock(run_dir))
        cleanup = ProcessCleanup(run_dir)
        at_the_end.callback(cleanup.stop)
        if not ray.is_initialized():
            with phase("starting Ray"):
                worker_logs = bool(os.environ.get("VERL_WORKER_LOGS"))
                connect(worker_logs=worker_logs, num_nodes=len(devices_of_nodes(config)))
            at_the_end.callback(disconnect)
            heed_interrupts()  # Ray put its own handler there, which would end all at once
        cleanup.watch()
        # The trainer starts the workers on the devices that the cluster has.
        device = device_of_cluster(config.trainer.device)
        if device == "cuda":
            require_engines_share_heads(config, inputs.models.policy)
        trainer = RLTrainer(on_nodes_that_are_there(config, device), device, inputs)
        at_the_end.callback(trainer.shutdown)
        cleanup.watch()
        print(ending(run_dir, trainer.fit()))


if __name__ == "__main__":
    leave(main())
