"""How an entry point ends: one line for the user, and an exit status for the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable

from verl.errors import ConfigError, DataError, DeviceOutOfMemory, RewardError, TrainingCollapsed, VerlError
from verl.process.secrets import mask_text

NEEDS_A_PERSON = (ConfigError, DataError, DeviceOutOfMemory, RewardError, TrainingCollapsed)


def exit_status(run: Callable[[], None], when_interrupted: Callable[[], str] | str) -> int:
    """Call `run` and return the exit status: 0 done, 1 failed, 2 the user must change something, 130 interrupted.

    A run that ended with 1 may work if it is started again. A VerlError is printed without a traceback and without
    secrets; any other error is a bug and is raised. `when_interrupted` says what is left; "" prints nothing.
    """
    try:
        run()
    except VerlError as error:
        print(f"error: {mask_text(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, NEEDS_A_PERSON) else 1
    except KeyboardInterrupt:
        left = when_interrupted if isinstance(when_interrupted, str) else when_interrupted()
        if left:
            print(f"interrupted: {left}", file=sys.stderr)
        return 130
    return 0
