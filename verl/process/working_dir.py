"""Where relative paths begin: in the folder that a run was started in, also for its workers on other nodes."""

from __future__ import annotations

import os

VARIABLE = "VERL_WORKING_DIR"


def working_dir_variable() -> dict[str, str]:
    """The environment variable for a worker that calls `enter_working_dir`."""
    return {VARIABLE: os.getcwd()}


def enter_working_dir() -> None:
    """Enter the folder that the run was started in: Ray starts a worker where its node's Ray was started. Raises
    FileNotFoundError.
    """
    if folder := os.environ.get(VARIABLE):
        os.chdir(folder)
