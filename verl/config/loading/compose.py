"""Compose a YAML tree with Hydra, apply overrides, and turn it into a typed dataclass. Works for any schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.loading.convert import build
from verl.config.loading.foreign import unknown_key
from verl.config.sections.keys import is_known, leaves, sections
from verl.errors import ConfigError
from verl.process.secrets import mask_secrets

T = TypeVar("T")

CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"


def load(schema: type[T], config_name: str, overrides: Iterable[str] = (), config_dir: str | None = None) -> T:
    """The tree `config_name` with `overrides`, as a `schema`.

    Files are looked for in `config_dir`, then in the repository's configs folder, so that a recipe anywhere may start
    from a tree there (`defaults: [ppo_trainer, _self_]`). An override is `key=value`; a leading `+` or `++` changes
    nothing, and of several for one key the last one wins. Raises ConfigError naming the key.
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
        override = _parse(text)
        OmegaConf.update(tree, override.key_or_group, override.value())
    return tree


def compose_tree(schema: type, config_name: str, overrides: Iterable[str], config_dir: str | None = None) -> DictConfig:
    """The composed tree before interpolations are resolved. Raises ConfigError."""
    folder = Path(config_dir).expanduser().resolve() if config_dir else CONFIG_DIR
    name = config_name.removesuffix(".yaml")
    _check_exists(folder, name)
    wanted = normalise_overrides(schema, overrides)
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            return compose(name, [f"hydra.searchpath=[{_in_quotes(f'file://{CONFIG_DIR}')}]", *wanted])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config '{name}' in {folder}: {_first_line(error)}") from error


def normalise_overrides(schema: type, overrides: Iterable[str]) -> list[str]:
    """Each override as `++key=value`, the last one of each key, after checking that its key exists."""
    by_key: dict[str, str] = {}
    for text in map(_grammatical, overrides):
        override = _parse(text)
        _check_key(schema, override)
        by_key.pop(override.key_or_group, None)
        by_key[override.key_or_group] = f"++{text.lstrip('+')}"
    return list(by_key.values())


def to_yaml(config: Any) -> str:
    """A config as YAML text that `load` reads back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(dataclasses.asdict(config))))


def shown(config: Any) -> str:
    """The YAML text without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(mask_secrets(dataclasses.asdict(config))))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _grammatical(text: str) -> str:
    """With quotes where Hydra's grammar demands them and nobody expects it: around a path with an é, say."""
    key, equals, value = text.partition("=")
    return text if value.isascii() or value[0] in "'\"[{" else f"{key}{equals}{_in_quotes(value)}"


def _in_quotes(value: str) -> str:
    escaped = value.replace("'", r"\'")
    return f"'{escaped}'"


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"override '{text}' cannot be read ({_first_line(error)}): write key=value, "
            "and quote a value with special characters, as in \"key='a<b'\""
        ) from error
    if override.is_delete():
        raise ConfigError(f"override '{text}': keys cannot be deleted; set a value instead (null where allowed)")
    if override.is_sweep_override():
        raise ConfigError(f"override '{text}' has several values; write a list as key=[a,b]")
    return override


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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
