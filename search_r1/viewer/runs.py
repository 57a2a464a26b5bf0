"""Find the runs below the given paths, and the trajectory files of each one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from verl.errors import DataError
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.tracker import CONFIG_FILE
from verl.tracking.trajectory_store import Kind, find_trajectories

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
        return self.path if self.path.is_dir() else self.path.parent

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
    if _is_run(folder):
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run or an evaluation. A run that has just begun has no trajectories yet."""
    return (
        (folder / "trajectories").is_dir()
        or (folder / EVALUATION_FILE).is_file()
        or ((folder / CONFIG_FILE).is_file() and (folder / FILE_NAME).is_file())
    )


def _files(place: Path) -> Iterator[StepFile]:
    if place.is_file():
        name = printable(place.stem)
        yield StepFile(name, name, 0, place, place.stat().st_mtime_ns)
        return
    for kind in get_args(Kind):
        for step, path in find_trajectories(place, kind).items():
            yield StepFile(path.stem, kind, step, path, path.stat().st_mtime_ns)
    whole = place / EVALUATION_FILE
    if whole.is_file():
        yield StepFile(whole.stem, "test", 0, whole, whole.stat().st_mtime_ns)


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
