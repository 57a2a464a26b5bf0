"""Find the runs below the given paths, the trajectory files of each one, and what the viewer needs besides: grammar,
reward, advantage estimator, tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import yaml
from tokenizers import Tokenizer

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.templates import stored_grammar
from text_file import read_text
from verl.errors import ConfigError, DataError
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.tracker import CONFIG_FILE
from verl.tracking.trajectory_store import Kind, find_trajectories, run_of_file

EVALUATION_FILE = "trajectories.parquet"  # what search_r1.evaluation leaves in its folder
_DEPTH = 3  # folders below a given one that are searched: runs/NAME/rl is two


@dataclass(frozen=True)
class StepFile:
    """One file of trajectories. `name` is unique within its run; `stamp` changes when the file is replaced."""

    name: str
    kind: str
    step: int
    path: Path
    stamp: int


@dataclass(frozen=True)
class Run:
    """`files` by kind, and by step within a kind. `path` is the folder, or a single file that was given."""

    name: str
    path: Path
    files: tuple[StepFile, ...]

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else run_of_file(self.path)

    @property
    def version(self) -> str:
        """A value that changes when any file changes."""
        text = "|".join(f"{file.name}:{file.stamp}" for file in self.files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def chosen(self, kind: str | None, step: int | None) -> list[StepFile]:
        """The files of a kind and a step; None means any."""
        return [file for file in self.files if kind in (None, file.kind) and step in (None, file.step)]

    def file(self, name: str) -> StepFile:
        """The file called `name`. Raises DataError if there is none."""
        found = next((file for file in self.files if file.name == name), None)
        if found is None:
            raise DataError(f"run {self.name} has no file of trajectories {name!r}; was it removed?")
        return found


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at or below `paths`: folders of runs and of evaluations, folders of them, and single Parquet files.

    Raises DataError for a path that does not exist or contains no run.
    """
    places = list(dict.fromkeys(place for path in paths for place in _places(path)))
    return [Run(name, place, tuple(_files(place))) for name, place in zip(_names(places), places, strict=True)]


def _places(path: Path) -> list[Path]:
    path = path.expanduser().absolute()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder; give that of a run (trainer.default_local_dir)")
    found = list(_runs_below(path, _DEPTH))
    if not found:
        raise DataError(f"{path}: neither a run nor a folder of runs: no {FILE_NAME} and no trajectories in it")
    return found


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """A folder that may not be read, such as lost+found, is passed over."""
    try:
        if _is_run(folder):
            yield folder
            return
        children = sorted(folder.iterdir()) if depth else []
        folders = [child for child in children if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return
    for child in folders:
        yield from _runs_below(child, depth - 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run or an evaluation. A run that has just begun has no trajectories yet."""
    return (
        (folder / "trajectories").is_dir()
        or (folder / EVALUATION_FILE).is_file()
        or ((folder / CONFIG_FILE).is_file() and (folder / FILE_NAME).is_file())
    )


def _files(place: Path) -> Iterator[StepFile]:
    """The files of a run. One that has gone in the meantime is passed over, as is a dangling link."""
    for name, kind, step, path in _named_files(place):
        with suppress(OSError):
            yield StepFile(name, kind, step, path, path.stat().st_mtime_ns)


def _named_files(place: Path) -> Iterator[tuple[str, str, int, Path]]:
    if place.is_file():
        name = printable(place.stem)
        yield name, name, 0, place
        return
    for kind in get_args(Kind):
        for step, path in find_trajectories(place, kind).items():
            yield path.stem, kind, step, path
    whole = place / EVALUATION_FILE
    if whole.is_file():
        yield whole.stem, "test", 0, whole


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell all of them apart."""
    if not places:
        return []
    longest = max(len(place.parts) for place in places)
    for length in range(1, longest + 1):
        names = [printable("/".join(place.parts[-length:])) for place in places]
        if len(set(names)) == len(names):
            break
    else:  # they differ in bytes that cannot be printed
        names = [f"{printable(place.name)} ({number})" for number, place in enumerate(places, start=1)]
    return names


def printable(name: str) -> str:
    """`name` with a replacement character for each byte that is not UTF-8, which neither a link nor JSON can hold."""
    return os.fsencode(name).decode("utf-8", "replace")


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
    notes: list[str] = []
    grammar, agent = SEARCH_R1, config.get("agent")
    try:
        grammar = stored_grammar(folder, agent if isinstance(agent, dict) else {})
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
