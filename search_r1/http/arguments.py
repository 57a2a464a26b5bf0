"""The arguments that every server has: its address, the timeout of a request, its token.

Imports no server, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os

from search_r1.errors import ServerError

_TOKEN_VARIABLE = "RETRIEVAL_AUTH_TOKEN"


def add_serving_arguments(
    parser: argparse.ArgumentParser, port: int = 8000, token_variable: str = _TOKEN_VARIABLE
) -> None:
    """Add `--host`, `--port`, `--timeout_s` and `--auth_token`."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port, help="port; 0 picks a free one")
    parser.add_argument(
        "--timeout_s", type=float, default=120, help="maximum time for a request, in seconds; then HTTP 504"
    )
    parser.add_argument(
        "--auth_token", help=f"bearer token that requests must carry; better set in the environment as {token_variable}"
    )


def check_serving_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the serving arguments. Raises `ServerError`."""
    if not 0 < arguments.timeout_s < float("inf"):
        raise ServerError(f"--timeout_s is {arguments.timeout_s}; it must be a positive number of seconds")


def read_token(arguments: argparse.Namespace, variable: str = _TOKEN_VARIABLE) -> str | None:
    """The token from the command line, or else from the environment. Raises `ServerError`, which never shows it."""
    token: str | None = arguments.auth_token
    if token is None:
        token = os.environ.get(variable)
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise ServerError(f"--auth_token (or {variable}) must be printable ASCII without spaces, not empty")
    return token
