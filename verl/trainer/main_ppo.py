"""`python3 -m verl.trainer.main_ppo key=value ...`: train (or only validate) a search agent by RL.

The command line is checked before anything heavy is imported, the prompt files and the environment before any model
is loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.config import check_supported, load_config_from_argv
from verl.errors import ConfigError, DataError, TrainingCollapsed, VerlError
from verl.tracking.secrets import mask_text

if TYPE_CHECKING:
    from verl.config import Config

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None, adapt: Callable[[Config], Config] = lambda config: config) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 the user has to decide or change something first, 130 interrupted.

    What ended with 1 may work when it is started again. `adapt` changes the config that the command line gave.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config = adapt(load_config_from_argv(sys.argv[1:] if argv is None else argv, default_name="ppo_trainer"))
        check_supported(config)
        run(config)
    except VerlError as error:
        print(f"error: {mask_text(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError | TrainingCollapsed) else 1
    except KeyboardInterrupt:
        print("interrupted: earlier checkpoints are intact", file=sys.stderr)
        return 130
    return 0


def run(config: Config) -> None:
    """Check the inputs, start Ray, train, and leave no process behind."""
    from verl.trainer.preflight import check_inputs

    check_inputs(config)

    import ray

    from verl.engine.device import resolve_device
    from verl.trainer.rl_trainer import RLTrainer

    started_here = not ray.is_initialized()
    if started_here:
        # Colocated roles share the devices and take turns, so Ray's own accounting of cores is not used.
        ray.init(include_dashboard=False, log_to_driver=bool(os.environ.get("VERL_WORKER_LOGS")), logging_level="error")
    trainer = RLTrainer(config, resolve_device(config.trainer.device).type)
    try:
        report = trainer.fit()
        print(f"report: {report}")
    finally:
        trainer.shutdown()
        if started_here:
            ray.shutdown()


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
