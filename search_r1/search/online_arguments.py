"""An online engine from the command line. Imports only what the chosen engine needs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from search_r1.errors import OnlineError, ServerError

if TYPE_CHECKING:
    from search_r1.search.online import OnlineSource
    from search_r1.search.online.options import CacheMode

_LOG = logging.getLogger(__name__)
_KEPT = {
    "off": "answers are not kept: every repetition is paid",
    "memory": "answers are kept in memory; --online_cache FILE keeps them for the next start too",
    "record": "answers are kept in the file of --online_cache",
    "replay": "answers come only from the file of --online_cache",
}
ENGINES = ("serper", "serpapi", "google", "brave", "tavily")  # the names in `search_r1.search.online.PROVIDERS`


def add_online_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the `--online_*` arguments, which `load_engine` reads."""
    group = parser.add_argument_group("online engines", f"of --retriever_name {', '.join(ENGINES)}")
    # the request
    group.add_argument("--online_endpoint", metavar="URL", help="address to use instead of the engine's own")
    group.add_argument(
        "--online_key_file", metavar="PATH", help="file with the API key, instead of the environment variable"
    )
    group.add_argument(
        "--online_field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="NAME=VALUE, an additional field of each request, repeatable; NAME:=JSON for a value that is not text",
    )
    # which answers are kept, and which pages are left out of them
    group.add_argument("--online_cache", metavar="PATH", help="file of the response cache")
    group.add_argument(
        "--online_cache_mode",
        choices=("off", "memory", "record", "replay"),
        help="default: record with --online_cache, else memory (lost when the server stops)",
    )
    group.add_argument(
        "--online_deny_file", metavar="PATH", help="further pages to leave out of the results, one per line"
    )
    # how many requests are sent, and what they cost
    group.add_argument(
        "--online_per_second", type=float, help="requests per second; default: the limit of a small plan"
    )
    group.add_argument("--online_concurrency", type=int, help="requests at the same time; default: the engine's")
    group.add_argument(
        "--online_price_per_1000",
        type=float,
        default=0.0,
        help="price of 1,000 answered requests, for the cost in the log",
    )


def load_engine(arguments: argparse.Namespace) -> OnlineSource:
    """The engine named by `--retriever_name`. Raises a `SearchError`."""
    from search_r1.search.online import OnlineOptions, load_online

    # A file given for the cache means that answers are recorded in it, unless a mode says otherwise.
    mode: CacheMode = arguments.online_cache_mode or ("record" if arguments.online_cache else "memory")
    in_file = mode in ("record", "replay")
    if in_file and not arguments.online_cache:
        raise ServerError(f"--online_cache_mode {mode} needs --online_cache, the file of the response cache")
    options = OnlineOptions(
        endpoint=arguments.online_endpoint,
        api_key_file=arguments.online_key_file,
        fields=dict(_field(text) for text in arguments.online_field),
        cache_mode=mode,
        cache_path=arguments.online_cache if in_file else None,
        deny_file=arguments.online_deny_file,
        per_second=arguments.online_per_second,
        concurrency=arguments.online_concurrency,
        price_per_1000=arguments.online_price_per_1000,
    )
    # An error names the engine by the flag that chose it.
    try:
        engine = load_online(arguments.retriever_name.lower(), options)
    except OnlineError as error:
        raise ServerError(f"--retriever_name {arguments.retriever_name}: {error}") from error
    _LOG.info("%s: at most %g requests per second; %s", engine.name, engine.per_second, _KEPT[mode])
    return engine


def published_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of a program with a few arguments of its own, which passes all others to the retrieval server."""
    return argparse.ArgumentParser(
        prog=f"python -m search_r1.search.{module}",
        description=description,
        epilog="Further arguments: those of python -m search_r1.search.retrieval_server.",
        allow_abbrev=False,
    )


def use_key(variable: str, key: str | None, flag: str) -> None:
    """Put a key that was passed with `flag` into the environment, and warn that it should be set there."""
    if key:
        print(f"warning: {flag} shows the key to everyone who runs ps; set {variable} instead", file=sys.stderr)
        os.environ[variable] = key


def _field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    is_json = name.endswith(":")
    name = name.removesuffix(":")
    if not separator or not name:
        raise ServerError(f"--online_field {text!r} is not NAME=VALUE or NAME:=JSON")
    try:
        return name, json.loads(value) if is_json else value
    except ValueError as error:
        raise ServerError(f"--online_field {name}: {value!r} is not JSON: {error}") from error
