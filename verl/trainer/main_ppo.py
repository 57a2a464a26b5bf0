"""`.venv/bin/python -m verl.trainer.main_ppo key=value ...`: train (or only validate) a search agent by RL.

The command line is checked before anything heavy is imported, the prompt files and the environment before any model
is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import check_supported, load_config_from_argv
from verl.config.doubtful import doubts
from verl.startup import log_to_stderr, phase, tell
from verl.trainer.exit_status import exit_status
from verl.trainer.resuming import check_start
from verl.trainer.run_lock import run_lock
from verl.trainer.saved_state import where_to_go_on

if TYPE_CHECKING:
    from verl.config import Config

log = logging.getLogger(__name__)

RAY_SETTINGS = {
    # On one machine the control store never comes back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # A process per core, started in advance, would serve nobody: each role has an environment of its own.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own choice, 15, leaves trainers and engines a thirtieth of a core beside whatever else is busy there,
    # a retrieval server for one.
    "RAY_worker_niceness": "0",
}
"""Environment variables of a Ray that starts here, where the user has not set them."""


def main(argv: list[str] | None = None, adapt: Callable[[Config], Config] = lambda config: config) -> int:
    """Returns the exit status, as `exit_status` says. `adapt` changes the config that the command line gave."""
    log_to_stderr()
    signal.signal(signal.SIGTERM, _interrupt)

    run_dir: Path | None = None

    def train() -> None:
        nonlocal run_dir
        config = adapt(load_config_from_argv(sys.argv[1:] if argv is None else argv, default_name="ppo_trainer"))
        check_supported(config)
        tell("the config is valid")
        for doubt in doubts(config):
            log.warning(doubt)
        run_dir = Path(config.trainer.default_local_dir)
        run(config)

    return exit_status(train, lambda: where_to_go_on(run_dir) if run_dir else "nothing was started")


def run(config: Config) -> None:
    """Check the inputs, start Ray, train, and leave no process behind."""
    check_start(config.trainer)

    with phase("checking prompt files, reward, models and environment"):
        from verl.trainer.preflight import check_inputs

        tell(f"loads {check_inputs(config)}")

    with phase("importing Ray and the trainer"):
        import ray

        from verl.single_controller import device_of_cluster
        from verl.trainer.janitor import Janitor
        from verl.trainer.rl_trainer import RLTrainer

    run_dir = Path(config.trainer.default_local_dir)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(run_lock(run_dir))
        janitor = Janitor(run_dir)
        at_the_end.callback(janitor.stop)
        if not ray.is_initialized():
            for name, value in RAY_SETTINGS.items():
                os.environ.setdefault(name, value)
            worker_logs = bool(os.environ.get("VERL_WORKER_LOGS"))
            with phase("starting Ray"):
                # Colocated roles share the devices and take turns, so Ray's own accounting of cores is not used.
                ray.init(include_dashboard=False, log_to_driver=worker_logs, logging_level="error")
            at_the_end.callback(ray.shutdown)
            signal.signal(signal.SIGTERM, _interrupt)  # Ray put its own handler there, which would end all at once
        janitor.watch()
        trainer = RLTrainer(config, device_of_cluster(config.trainer.device))
        at_the_end.callback(trainer.shutdown)
        janitor.watch()
        print(f"report: {trainer.fit()}")


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
