"""What the programs of training write to standard error."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, datefmt="%H:%M:%S")
