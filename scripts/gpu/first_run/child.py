"""What the modules that run in a process of their own have in common: two options, and a result in a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from first_run.result import Result


def run_child(check: Callable[[argparse.Namespace], Result], *options: tuple[str, type]) -> None:
    """Parse `--device`, `--result` and further `options`, check, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--result", type=Path, required=True)
    for name, kind in options:
        parser.add_argument(name, type=kind, required=True)
    args = parser.parse_args()
    check(args).write(args.result)
