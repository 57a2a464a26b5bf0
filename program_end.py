"""How a program ends: the one line of an expected error, without secrets, and the exit status.

This module imports nothing of the project but `url_text`, so that every room may use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from url_text import mask_text

FAILED = 1
NEEDS_A_PERSON = 2
"""The exit status of a program that fails the same way each time, until somebody changes something."""


class ExpectedError(Exception):
    """An error that is raised on purpose; a program that it ends prints its message, and no traceback."""

    exit_status: ClassVar[int] = FAILED


def print_error(error: Exception) -> None:
    """Print the one line of a program that ends with an expected error: no traceback and no secrets."""
    print(f"error: {mask_text(str(error))}", file=sys.stderr)


def exit_status(run: Callable[[], int | None], when_interrupted: Callable[[], str] | str) -> int:
    """Call `run` and return the exit status: 0 done (or what `run` returns), 1 failed, 2 the user must act,
    130 interrupted.

    A program that ended with 1 may work if it is started again. An ExpectedError is told by `print_error`; any other
    error is a bug and is raised. `when_interrupted` says what is left; "" prints nothing.
    """
    try:
        return run() or 0
    except ExpectedError as error:
        print_error(error)
        return error.exit_status
    except KeyboardInterrupt:
        left = when_interrupted if isinstance(when_interrupted, str) else when_interrupted()
        if left:
            print(f"interrupted: {left}", file=sys.stderr)
        return 130
