"""What the viewer needs from a run besides its trajectories: grammar, reward, advantage estimator, tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.templates import TEMPLATE_FILE, load_template
from text_file import read_text
from verl.errors import ConfigError, DataError
from verl.tracking.tracker import CONFIG_FILE

TOKENIZER_FILE = "tokenizer.json"
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class RunSettings:
    """`notes` say what was not available, and what is used instead."""

    config: dict[str, Any]
    grammar: Grammar
    tokenizer_file: Path | None
    notes: tuple[str, ...]

    def setting(self, dotted: str, default: Any = None) -> Any:
        """The configuration value at `a.b.c`."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value


def read_settings(folder: Path, tokenizer: Path | None = None) -> RunSettings:
    """The settings of the run in `folder`; the file `tokenizer` overrides the run's own. Raises DataError."""
    file = folder / CONFIG_FILE
    config = _config(file, file.stat().st_mtime_ns) if file.is_file() else {}
    # The grammar of the run's own copy of its template, else of the one that its config names.
    notes: list[str] = []
    grammar = SEARCH_R1
    agent = config.get("agent")
    agent = agent if isinstance(agent, dict) else {}
    own = folder / TEMPLATE_FILE
    template = own if own.is_file() else agent.get("template")
    if template:
        try:
            grammar = load_template(str(template)).grammar
            # a run of before there was this key had the published rule
            grammar = replace(grammar, tags_in_thoughts=bool(agent.get("tags_in_thoughts", True)))
        except (ConfigError, OSError, ValueError) as error:
            notes.append(f"Tags are those of Search-R1: the run's template cannot be read ({error}).")
    # The tokenizer that was given, else the run's own.
    found = tokenizer or _find_tokenizer(folder, config)
    if found is None:
        notes.append("No tokenizer found: tokens are shown by their ids. Give its folder with --tokenizer.")
    return RunSettings(config, grammar, found, tuple(notes))


@lru_cache(maxsize=2)  # that of a large vocabulary has 100 MB
def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer file. Raises DataError if it is not one."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise DataError(f"{path} is no tokenizer: {error}; give another one with --tokenizer") from error


@lru_cache(maxsize=64)
def _config(path: Path, _stamp: int) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(read_text(path, DataError))
    except yaml.YAMLError as error:
        raise DataError(f"{path} is no YAML: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def tokenizer_file(place: Path) -> Path:
    """The tokenizer file in a model's folder, or the file itself. Raises DataError if there is none."""
    place = place.expanduser()
    path = place / TOKENIZER_FILE if place.is_dir() else place
    if not path.is_file():
        raise DataError(f"--tokenizer {place}: there is no {TOKENIZER_FILE}; give the folder of a model")
    return path


def _find_tokenizer(folder: Path, config: dict[str, Any]) -> Path | None:
    """The tokenizer file beside the newest checkpoint, else that of the config's model, here or in the hub's cache."""
    saved = [path for part in ("actor", ".") for path in (folder / part).glob(f"global_step_*/{TOKENIZER_FILE}")]
    if saved:
        return max(saved, key=_step_of)
    settings = RunSettings(config, SEARCH_R1, None, ())
    for key in ("data.tokenizer", "actor_rollout_ref.model.path", "model.path"):
        name = settings.setting(key)
        if name and (found := _in_folder_or_cache(str(name))):
            return found
    return None


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.parent.name)
    return int(match.group(1)) if match else -1


def _in_folder_or_cache(name: str) -> Path | None:
    """The tokenizer file of a model's folder, or of a hub model in the cache; nothing is fetched."""
    path = Path(name).expanduser() / TOKENIZER_FILE
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, TOKENIZER_FILE)
    except HFValidationError:  # a path that is not there
        return None
    return Path(cached) if isinstance(cached, str) else None
