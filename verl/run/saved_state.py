"""Saved states of a run on disk: written atomically, verified before they are used.

    {run folder}/state/global_step_N/
        manifest.json     every other file with its bytes and SHA-256, written last
        trainer.json      what the driver knows: steps, prompt order, KL weight, guard, best validation
        actor/, critic/   shards in PyTorch's distributed checkpoint format

A folder is written under a temporary name and renamed when everything is on the disk.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from long_task import BYTES, Progress, reading
from verl.errors import CheckpointError
from verl.process.startup import beside
from verl.process.storage import Digests, could_not_write, digest, digest_of, sync

FOLDER, MANIFEST, TRAINER = "state", "manifest.json", "trainer.json"
PREFIX = "global_step_"
LOOK_S = 0.5


def state_path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"{PREFIX}{step}"


def begin(path: Path, roles: list[str], progress: dict[str, Any]) -> Path:
    """Make a temporary folder beside `path` for the roles' files, with trainer.json in it. Raises CheckpointError."""
    temporary = path.with_name(f".{path.name}.writing")
    with _whole_or_removed(temporary, path):
        shutil.rmtree(temporary, ignore_errors=True)
        for role in roles:
            (temporary / role).mkdir(parents=True)
        _write(temporary / TRAINER, progress)
    return temporary


def finish(temporary: Path, path: Path, digests: Digests) -> None:
    """Add the manifest and rename the folder to `path`. `digests` are those of the roles' files. Raises
    CheckpointError.
    """
    with _whole_or_removed(temporary, path):
        files = digests | {TRAINER: digest(temporary / TRAINER)}
        _write(temporary / MANIFEST, {name: list(found) for name, found in sorted(files.items())})
        for folder in [*(child for child in temporary.iterdir() if child.is_dir()), temporary]:
            sync(folder)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        sync(path.parent)


def discard(temporary: Path) -> None:
    """Remove what `begin` made, as far as possible: its space is needed, and it is never read."""
    shutil.rmtree(temporary, ignore_errors=True)


def verify(path: Path) -> None:
    """Raise CheckpointError, naming the file, unless the folder has exactly the manifest's files, byte for byte."""
    # The manifest itself.
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {name: (int(size), str(checksum)) for name, (size, checksum) in manifest.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if TRAINER not in files:
        raise CheckpointError(f"{path / MANIFEST} does not list {TRAINER}")

    # Every file that it lists is there, as it was saved.
    for name, expected in files.items():
        try:
            with reading(path / name, f"verify {path.name}/{name}") as opened:
                found = digest_of(opened)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
        if found != expected:
            what = f"{found[0]} bytes, not {expected[0]}" if found[0] != expected[0] else "another checksum"
            raise CheckpointError(f"{path / name} has {what}, unlike in {MANIFEST}: it was changed after it was saved")

    # No other file: it would be loaded as if it belonged to the state.
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.relative_to(path).as_posix() not in {*files, MANIFEST}:
            raise CheckpointError(f"{file} is not listed in {MANIFEST}: it was added after the checkpoint was saved")


def require_roles(path: Path, roles: Iterable[str]) -> None:
    """Raise CheckpointError unless the folder has the files of each role."""
    for role in roles:
        if not (path / role).is_dir():
            raise CheckpointError(f"{path} has no {role}: it belongs to a run with other roles; start a new run")


def read_progress(path: Path) -> dict[str, Any]:
    """The `progress` given to `begin`, from a verified folder."""
    progress: dict[str, Any] = json.loads((path / TRAINER).read_text())
    return progress


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest folder that passes `verify`, and why each newer one does not."""
    skipped = []
    for path in reversed(list(saved(run_dir))):
        try:
            verify(path)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def saved(run_dir: Path) -> Iterator[Path]:
    """The folders of a run, by step."""
    yield from step_folders(run_dir / FOLDER)


def step_folders(folder: Path) -> list[Path]:
    """The folders `global_step_N` in `folder`, by step: states, or models of a role."""
    paths = folder.glob(f"{PREFIX}*")
    return sorted((path for path in paths if path.name.removeprefix(PREFIX).isdigit()), key=step_of)


def how_to_resume(run_dir: Path) -> str:
    """A sentence for a user whose run has ended too early."""
    states = list(saved(run_dir))
    if states:
        return f"with trainer.resume_mode=auto the run resumes from {states[-1]}"
    return "no checkpoint was saved yet: trainer.save_freq=N saves one every N steps"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _write(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    sync(path)


@contextmanager
def _whole_or_removed(temporary: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = could_not_write(path, error)  # with the space that is left before anything is removed
        discard(temporary)
        raise CheckpointError(why) from error


# Progress of writing a checkpoint, measured on disk, because the ranks that write it are other processes.


@contextmanager
def saving(path: Path, expected: int | None = None) -> Iterator[None]:
    """Show progress while `path` is written, under its temporary name.

    Its final size is assumed to be that of the newest checkpoint beside it, or `expected`; without either, a rate is
    shown but no time left.
    """
    written = path.with_name(f".{path.name}.writing")
    earlier = [folder for folder in step_folders(path.parent) if folder != path]
    total = folder_bytes(earlier[-1]) if earlier else expected
    with (
        Progress(f"save {path.parent.name}/{path.name}", total, unit=BYTES) as progress,
        beside(partial(_look, written, progress)),
    ):
        yield


def folder_bytes(folder: Path) -> int:
    """The size of the files in a folder, also of those that are about to be renamed."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # it has another name by now
            continue
    return total


def _look(folder: Path, progress: Progress, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        found = folder_bytes(folder)
        if found > progress.done:
            progress.reach(found)
