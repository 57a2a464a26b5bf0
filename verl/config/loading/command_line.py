"""The command line of an entry point: `key=value ...`, Hydra's options as far as they have a meaning here, and the runs
of a sweep, one for each combination of the values that overrides have (`trainer.seed=0,1,2`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hydra.core.override_parser.types import Glob

from verl.config.loading.compose import described, parsed, shown
from verl.config.loading.run import load_config
from verl.config.sections.fields import Key, leaves, type_name
from verl.config.sections.schema import Config
from verl.errors import ConfigError

T = TypeVar("T")


def load_config_from_argv(
    argv: Sequence[str], default_name: str = "ppo_trainer", own: argparse.ArgumentParser | None = None
) -> Config:
    """The configuration of an RL run from its arguments (without the program's name).

    `--help`, `--cfg job` and `--info` print and exit with status 0, a malformed option exits with status 2. Raises
    ConfigError, also for `-m`: a program that can run a sweep asks `is_sweep` first. `own`: options of a program that
    runs no sweep and has read them from its arguments; `--help` shows them.
    """
    return load_from_argv(Config, load_config, argv, default_name, own)


def load_from_argv(
    schema: type[T],
    loader: Callable[[str, list[str], str | None], T],
    argv: Sequence[str],
    default_name: str,
    own: argparse.ArgumentParser | None = None,
) -> T:
    """The configuration of any schema; `loader(config_name, overrides, config_dir)` composes and checks it."""
    arguments = parse_arguments(argv, default_name)
    given = arguments.config_name, arguments.overrides, arguments.config_dir
    # What --help and --info print needs no settings that are valid together.
    if arguments.help:
        sys.stdout.write(f"{_parser(default_name, own).format_help()}\nKeys:\n{key_list(schema)}")
        sys.exit(0)
    if arguments.multirun:
        raise ConfigError(f"{_program()} takes one configuration: leave out -m, and give one value for each key")
    if arguments.info:
        sys.stdout.write(described(schema, *given))
        sys.exit(0)
    # Printed settings have passed the same checks as those of a run.
    config = loader(*given)
    if arguments.cfg:
        sys.stdout.write(shown(config, arguments.package))
        sys.exit(0)
    return config


def parse_arguments(argv: Sequence[str], default_name: str) -> argparse.Namespace:
    """The arguments by name: `overrides`, `config_name`, `config_dir`, `multirun`, and what is to be printed."""
    parser = _parser(default_name)
    arguments = parser.parse_intermixed_args(list(argv))
    if (arguments.resolve or arguments.package) and not arguments.cfg:
        parser.error("--resolve and --package go with --cfg job")
    if arguments.multirun and (arguments.cfg or arguments.info):
        parser.error("--cfg and --info show one configuration: leave out -m")
    return arguments


def is_sweep(argv: Sequence[str], default_name: str) -> bool:
    """Whether the arguments ask for several runs (`-m`), and not for help."""
    arguments = parse_arguments(argv, default_name)
    return arguments.multirun and not arguments.help


def _program() -> str:
    """How this process was started: several programs share this parser."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python {sys.argv[0]}" if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def add_file_options(parser: argparse.ArgumentParser, default_name: str) -> None:
    """The options that say which YAML file the settings start from: `config_name` and `config_dir`."""
    parser.add_argument("--config-name", "-cn", default=default_name, help="YAML file to start from (%(default)s)")
    for_folder = ("--config-dir", "-cd", "--config-path", "-cp")
    parser.add_argument(*for_folder, metavar="DIR", help="folder that is searched for that file first")


def _parser(default_name: str, own: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        parents=[own] if own else [],
        add_help=False,
        allow_abbrev=False,
        description="The settings are keys of a YAML tree; override any of them as key=value.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides; if a key is given twice, the last one wins"
    )
    add_file_options(parser, default_name)
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed settings as YAML, and exit")
    parser.add_argument("--package", "-p", metavar="SECTION", help="with --cfg job: print this section only")
    parser.add_argument("--resolve", action="store_true", help="with --cfg job: resolve interpolations (as always)")
    parser.add_argument("--info", action="store_true", help="print which YAML files the settings come from, and exit")
    several = "a run for each combination of values, as in trainer.seed=0,1,2"
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS if own else several)
    parser.add_argument("--help", "-h", action="store_true", help="print this help and all keys, and exit")
    return parser


# All settings as text for a terminal: what `--help` prints.


def key_list(schema: type) -> str:
    """All keys with default and meaning, for a terminal of 100 columns."""
    indent = " " * 6
    lines = []
    for key in leaves(schema).values():
        lines.append(f"  {key.path} = {default_text(key)}")
        lines += textwrap.wrap(
            f"{key.meaning} ({type_text(key)})",
            100,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def default_text(key: Key) -> str:
    """The default as YAML writes it, an interpolation unresolved."""
    return key.shown if key.shown else _yaml(key.default)


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return json.dumps(value)


def type_text(key: Key) -> str:
    """The type and range, as in `int or null; >= 1`."""
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = ", ".join(f"{words[name]} {bound:g}" for name, bound in key.bounds.items())
    return f"{type_name(key.type)}; {limits}" if limits else type_name(key.type)


QUOTES = "'\""
MAX_NAME = 120  # characters of a folder's name


@dataclass(frozen=True)
class Combination:
    """One run. `values` has those of the swept keys, as text; `name` can be that of a folder."""

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]


def combinations(schema: type, overrides: Iterable[str]) -> list[Combination]:
    """The last given key changes fastest, as in Hydra's own sweeps: `a=0,1 b=x,y` is 0 x, 0 y, 1 x, 1 y.

    Values are given as `key=a,b`, `key=choice(a,b)` or `key=range(1,4)`. Raises ConfigError if none has several, and
    for one whose values cannot be listed, as `interval(0,1)`.
    """
    # Overrides with one value are those of every run. Of several for a key the last one counts.
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in overrides:
        override = parsed(schema, text, sweeps=True)
        key = override.key_or_group
        if not override.is_sweep_override():
            fixed.append(text)
            swept.pop(key, None)  # of several overrides of a key the last one counts
            continue
        listed = override.is_discrete_sweep() and not isinstance(override.value(), Glob)  # a pattern of files' names
        elements = list(override.sweep_string_iterator()) if listed else []
        if not elements:
            raise ConfigError(f"override '{text}': a sweep needs its values one by one, as in {key}=0.1,0.2")
        fixed = [other for other in fixed if parsed(schema, other, sweeps=True).key_or_group != key]
        swept[key] = elements
    if not swept:
        raise ConfigError("-m runs several configurations, so a key needs several values, as in trainer.seed=0,1,2")
    # A run is named after its values, or numbered where such names are too long or not distinct. Keys are shortened to
    # their last parts where that tells them apart.
    last = [key.rpartition(".")[2] for key in swept]
    short = dict(zip(swept, last if len(set(last)) == len(swept) else swept, strict=True))
    found = []
    for chosen in itertools.product(*swept.values()):
        values = dict(zip(swept, chosen, strict=True))
        name = ",".join(
            f"{short[key]}={re.sub(r'[^A-Za-z0-9._+-]+', '_', value.strip(QUOTES))}" for key, value in values.items()
        )
        found.append(Combination(name, values, (*fixed, *(f"{key}={value}" for key, value in values.items()))))
    if len({one.name for one in found}) < len(found) or max(len(one.name) for one in found) > MAX_NAME:
        found = [Combination(f"run_{n}", one.values, one.overrides) for n, one in enumerate(found)]
    return found
