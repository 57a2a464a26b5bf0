"""View stored trajectories in a browser: which reward each one got, and why.

    search-r1 view RUN_DIR...
    .venv/bin/python -m search_r1.viewer RUN_DIR --port 0

RUN_DIR is the folder of a run or of an evaluation, a folder of such folders, or a Parquet file of trajectories. The run
may still be in progress.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from program_end import exit_status

TOKEN_VARIABLE = "SEARCH_R1_AUTH_TOKEN"
PORT = 8002


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from search_r1.http.arguments import add_serving_arguments
    from search_r1.script_help import parser_of

    parser = parser_of(__doc__, "python -m search_r1.viewer")
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="run folders, evaluation folders, folders that contain them, or parquet files of trajectories",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of a model, for the texts of tokens (default: the run's own)",
    )
    add_serving_arguments(parser, port=PORT, token_variable=TOKEN_VARIABLE)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says."""
    args = parse_arguments(argv)
    return exit_status(lambda: _serve(args), when_interrupted="")


def _serve(args: argparse.Namespace) -> None:
    from search_r1.http.gate import Metrics  # heavy imports come after --help
    from search_r1.http.process import announce, bind, check_serving_arguments, read_token, serve
    from search_r1.viewer.app import create_app
    from search_r1.viewer.pages import Pages
    from verl.process.startup import log_to_stderr

    log_to_stderr()
    check_serving_arguments(args)
    token = read_token(args, TOKEN_VARIABLE)
    pages = Pages(args.paths, args.tokenizer)
    # A wrong path ends the program here, before it takes an address.
    runs = pages.runs()
    listener = bind(args.host, args.port)
    app = create_app(pages, Metrics("search_r1_viewer"), token, args.timeout_s)
    listener.listen()  # who follows the address at once waits, and is not refused
    announce(f"{len(runs)} run{'s' * (len(runs) != 1)}", listener, token, "/")
    serve(app, listener)


def _leave(status: int) -> NoReturn:
    """End this process without Python's teardown, in which DuckDB's bindings print 50 lines about leaks: the server's
    threads, which are never joined, still hold some of their objects.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
