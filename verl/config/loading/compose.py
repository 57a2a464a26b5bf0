"""Compose a YAML tree with Hydra, apply overrides, and turn it into a typed dataclass. Works for any schema."""

from __future__ import annotations

import dataclasses
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from text_file import read_text
from verl.config.loading.convert import build
from verl.config.loading.foreign import of_hydra, unknown_key
from verl.config.sections.fields import alternatives, is_known, leaves, sections
from verl.errors import ConfigError
from verl.process.secrets import mask_secrets

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parents[2]
CONFIG_DIR = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"
"""In an installed package the folder is inside; in the repository it stands beside."""


def load(schema: type[T], config_name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> T:
    """The tree `config_name` with `overrides`, as a `schema`.

    Files are looked for in `config_dir`, then in the repository's configs folder, so that a recipe anywhere may start
    from a tree there (`defaults: [ppo_trainer, _self_]`). An override is `key=value`; a leading `+` or `++` changes
    nothing, and of several for one key the last one wins. `~key` gives a setting its default again, or takes an entry
    out of a mapping. Raises ConfigError naming the key.
    """
    return typed(schema, compose_tree(schema, config_name, overrides, config_dir), f"config '{config_name}'")


def typed(schema: type[T], tree: DictConfig, source: str) -> T:
    """A composed tree, its interpolations resolved, as a `schema`. Raises ConfigError, which names the `source`."""
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from error
    return build(schema, values)


def overridden(schema: type, tree: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """A copy of a tree with `overrides`, as `load` understands them. Raises ConfigError naming the key."""
    tree = tree.copy()
    for text in normalise_overrides(schema, overrides):
        override = parsed(schema, text)
        if not override.is_delete():
            OmegaConf.update(tree, override.key_or_group, override.value())
            continue
        above, _, name = override.key_or_group.rpartition(".")
        if name not in (entries := OmegaConf.select(tree, above) or {}):
            raise ConfigError(f"override '{text}': there is no such entry")
        del entries[name]
    return tree


def compose_tree(schema: type, config_name: str, overrides: Iterable[str], config_dir: str | None = None) -> DictConfig:
    """The composed tree before interpolations are resolved. Raises ConfigError."""
    with _composing(config_name, config_dir) as (name, search_path):
        return compose(name, [search_path, *normalise_overrides(schema, overrides)])


def described(schema: type, config_name: str, overrides: Iterable[str], config_dir: str | None = None) -> str:
    """The folders that are searched for YAML files, and the files that a tree is made of, each with its folder."""
    with _composing(config_name, config_dir) as (name, search_path):
        wanted = [search_path, *normalise_overrides(schema, overrides)]
        loader = GlobalHydra.instance().config_loader()
        files = loader.compute_defaults_list(name, wanted, RunMode.RUN).defaults
        folders = [path.path.removeprefix("file://") for path in loader.get_search_path().get_path()]
    # Places like `pkg://` are no folders on disk; the repository's folder is always searched.
    folders = [folder for folder in dict.fromkeys([*folders, str(CONFIG_DIR)]) if "://" not in folder]
    lines = ["Folders that are searched for YAML files:", *(f"  {folder}" for folder in folders)]
    lines.append("Files of this configuration; a later one wins:")
    for path in (file.config_path for file in files):
        # A file counts in the first folder that has it. Files in none of them are parts of Hydra itself.
        home = next((folder for folder in folders if (Path(folder) / f"{path}.yaml").is_file()), "")
        if home:
            lines.append(f"  {Path(home) / path}.yaml")
    return "\n".join([*lines, "Overrides:", *(f"  {text}" for text in wanted[1:] or ["none"])]) + "\n"


@contextmanager
def _composing(config_name: str, config_dir: str | None) -> Iterator[tuple[str, str]]:
    """The file's name without suffix, and the override that adds the repository's folder. Raises ConfigError."""
    folder = Path(config_dir).expanduser().resolve() if config_dir else CONFIG_DIR
    name = config_name.removesuffix(".yaml")
    _check_exists(folder, name)
    _check_marks(folder)
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            yield name, f"hydra.searchpath=[{in_quotes(f'file://{CONFIG_DIR}')}]"
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config '{name}' in {folder}: {_first_line(error)}") from error
    except UnicodeDecodeError:
        # This error does not say in which file it is: the first one that is no UTF-8 is named instead.
        for path in _yaml_files(folder):
            read_text(path, ConfigError)
        raise
    except YAMLError as error:
        raise ConfigError(f"config '{name}' in {folder} is no YAML: {' '.join(str(error).split())}") from error


def normalise_overrides(schema: type, overrides: Iterable[str]) -> list[str]:
    """Each override as `++key=value`, the last one of each key, after checking that its key exists.

    `~key` is `++key=DEFAULT`, and stays as it is for an entry of a mapping. Hydra merges a mapping into the one that is
    there, so one is first taken away where it gets its default again.
    """
    by_key: dict[str, list[str]] = {}
    for text in of_hydra(overrides):
        override = parsed(schema, text)
        key = override.key_or_group
        if override.is_sweep_override():
            raise ConfigError(f"override '{text}' has several values: a run for each needs -m; a list is key=[a,b]")
        _check_key(schema, override)
        before = by_key.pop(key, [])
        if override.is_delete():
            by_key[key] = _deletion(schema, override)
            continue
        line = override.input_line or text
        # A mapping that was taken away before stays so, whatever entries it gets then.
        taken_away = before[:1] if len(before) > 1 else []
        by_key[key] = [*taken_away, f"++{line.lstrip('+')}"]
    return [line for lines in by_key.values() for line in lines]


def _deletion(schema: type, override: Override) -> list[str]:
    key = override.key_or_group
    if override.value() is not None:
        raise ConfigError(f"override '{override.input_line}': write ~{key}, without a value")
    if key not in leaves(schema):
        return [f"~{key}"]
    setting = leaves(schema)[key]
    taken_away = [f"++{key}=null"] if setting.free_form else []
    return [*taken_away, f"++{key}={setting.shown or _literal(setting.default)}"]


def _literal(value: Any) -> str:
    """A default as Hydra's grammar has it."""
    if isinstance(value, str):
        return in_quotes(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_literal, value))}]"
    return json.dumps(value)


def to_yaml(config: Any) -> str:
    """A config as YAML text that `load` reads back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(dataclasses.asdict(config))))


def shown(config: Any, section: str | None = None) -> str:
    """The YAML text without secrets, of all settings or of a section. Raises ConfigError for one that is not there."""
    tree = OmegaConf.create(mask_secrets(dataclasses.asdict(config)))
    if section is None:
        return OmegaConf.to_yaml(tree)
    part = OmegaConf.select(tree, section)
    if not isinstance(part, DictConfig):
        raise ConfigError(f"--package {section}: there is no such section; there are {', '.join(map(str, tree))}")
    return f"# @package {section}\n{OmegaConf.to_yaml(part)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def in_quotes(value: str) -> str:
    """A string as Hydra's grammar has it: backslashes count only in front of a quotation mark."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (r"\'" if found[2] else ""), value)
    return f"'{escaped}'"


def parsed(schema: type, text: str, sweeps: bool = False) -> Override:
    """An override, which may have several values. Raises ConfigError if it cannot be read.

    Hydra's grammar knows few characters outside quotation marks, and makes numbers of what looks like one. So the value
    of a setting that is text (a name, a path) is taken as it is written, unless it is in quotation marks, is `null`, or
    has a backslash; with `sweeps` unless it has several values.
    """
    key, _, value = text.partition("=")
    setting = leaves(schema).get(key.lstrip("+"))
    kinds = alternatives(str if setting is None else setting.type)
    may_be_list = setting is None or any(get_origin(kind) is list for kind in kinds)
    may_be_text = value != "" and str in kinds and value[0] not in ("'\"[{" if may_be_list else "'\"")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        several = sweeps and "," in value
        if may_be_text and not several:
            return parser.parse_override(f"{key}={in_quotes(value)}")
        if may_be_text and not re.search("['\"]", value):  # else a comma may be in quotation marks
            values = ",".join(in_quotes(part.strip()) for part in value.split(","))
            return parser.parse_override(f"{key}={values}")
        raise ConfigError(
            f"override '{text}' cannot be read ({_first_line(error)}): write key=value, "
            "and quote a value with special characters, as in \"key='a<b'\""
        ) from error

    # An entry of a mapping may be anything, and several values may be those of a sweep, or a list without its brackets.
    if setting is None or not may_be_text or "\\" in value or value.lower() == "null":
        return override
    if override.is_sweep_override() and (sweeps or may_be_list):
        return override
    return parser.parse_override(f"{key}={in_quotes(value)}")


def _check_key(schema: type, override: Override) -> None:
    key = override.key_or_group
    if not is_known(schema, key):
        raise ConfigError(unknown_key(schema, key))
    if key in sections(schema) and not isinstance(override.value(), dict):
        first = next(k for k in leaves(schema) if k.startswith(f"{key}."))
        raise ConfigError(f"'{key}' is a section and has no value of its own; set a key in it, such as '{first}'")


def _check_exists(folder: Path, name: str) -> None:
    if (folder / f"{name}.yaml").is_file():
        return
    names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
    raise ConfigError(f"no config '{name}.yaml' in {folder} (there are: {names}); --config-dir names another folder")


def _check_marks(folder: Path) -> None:
    """Raise ConfigError for a `# @package` line that Hydra would not see behind a byte order mark."""
    for path in _yaml_files(folder):
        with path.open("rb") as file:
            start = file.read(512)
        if start.startswith(BOM_UTF8) and b"@package" in start:
            raise ConfigError(f"{path}: begins with a byte order mark, which hides its @package line; save it without")


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in ("*.yaml", "*/*.yaml") for path in folder.glob(pattern) if path.is_file())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
