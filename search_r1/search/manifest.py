"""A record next to an index of what it was built from, so that it is never used with another corpus or encoder, and so
that a builder overwrites nothing but an empty folder or what a builder wrote.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from search_r1.errors import CorpusError, IndexMismatchError, TargetTakenError, UnwritableError


def manifest_path(index_path: Path) -> Path:
    """The path of the manifest of an index or embeddings file."""
    return index_path.with_name(index_path.name + ".json")


def write_manifest(path: Path, fields: dict[str, Any]) -> None:
    """Save `fields` as JSON, atomically."""
    with staged(path) as staging:
        staging.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A file beside `target`, renamed to it at the end: no reader ever sees half a file.

    Nobody else has its name: in containers, all processes may have the same id.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The saved fields, or None if there is no manifest. Raises `IndexMismatchError` if it is unreadable."""
    try:
        if not path.is_file():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IndexMismatchError(f"{path} cannot be read: {error.strerror or error}; allow reading it") from error
    except ValueError as error:
        raise IndexMismatchError(f"{path} is not a JSON manifest: {error}; build the index again") from error
    if not isinstance(fields, dict):
        raise IndexMismatchError(f"{path} is not a JSON object; build the index again")
    return fields


def check_manifest(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `IndexMismatchError` naming every field of `expected` that differs in `found`."""
    differing = [key for key, value in expected.items() if found.get(key) != value]
    if differing:
        wrong = [f"{key}: index has {found.get(key)!r}, now {expected[key]!r}" for key in differing]
        raise IndexMismatchError(
            f"the index of {path} does not match ({'; '.join(wrong)}); use what it was built from or build it again"
        )


_EVERY_MANIFEST = {"format", "corpus"}  # fields of all manifests that a builder writes


def check_file(path: Path) -> None:
    """Raise `TargetTakenError` if `path` or its manifest exists and no builder wrote it."""
    manifest = manifest_path(path)
    if os.path.lexists(path) or os.path.lexists(manifest):
        _check_manifest(manifest, path if os.path.lexists(path) else manifest)


def check_folder(folder: Path, manifest: str) -> None:
    """Raise `TargetTakenError` if `folder` exists, is not empty, and has no `manifest` of a builder."""
    empty = folder.is_dir() and not any(folder.iterdir())
    if os.path.lexists(folder) and not empty:
        _check_manifest(folder / manifest, folder)


def replace_folder(new: Path, folder: Path, manifest: str) -> None:
    """Rename `new` to `folder`. Only files that the new folder has, too, are removed from an existing `folder`.

    Everything else in it is kept. Raises `TargetTakenError` like `check_folder`.
    """
    check_folder(folder, manifest)
    if not folder.exists():
        new.rename(folder)
        return
    # Swap: at no time is there half an index under its name, and a failure brings the old one back.
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    # Bring back what the new folder does not have.
    for entry in sorted(old.iterdir()):
        if os.path.lexists(folder / entry.name):
            entry.unlink()
        else:
            entry.rename(folder / entry.name)
    old.rmdir()


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise `UnwritableError` in place of an OSError of the block, which writes to `target`."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(
            f"{target} cannot be written: {error.strerror or error}; make room or allow it, or name another folder"
        ) from error


@contextmanager
def only_builder(folder: Path) -> Iterator[None]:
    """Make `folder`, and hold it while an index is built in it: two builders would write to the same unfinished files.

    Raises `TargetTakenError` while another process holds it, `UnwritableError` if it cannot be made.
    """
    path = folder / ".building"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    with lock:
        if not takes_lock(lock, path):
            raise TargetTakenError(f"another process builds an index in {folder}; wait, or pass another --save_dir")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def takes_lock(file: IO[Any], path: Path) -> bool:
    """Lock `file`, opened from `path`, until it is closed. False if another process has it, or has just removed or
    renamed it; True on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


def check_not_read(option: str, target: Path | None, inputs: Iterable[Path]) -> None:
    """Raise `CorpusError` if `target`, the file of `option`, is one of the `inputs`."""
    for path in inputs:
        if target is not None and target.exists() and path.exists() and target.samefile(path):
            raise CorpusError(f"{target} is an input of this command; write to another {option}")


def make_folder_of(option: str, target: Path) -> None:
    """Make the folder of `target`, the file of `option`, which is written after long work, and see that it takes files.

    Raises `CorpusError`.
    """
    if target.is_dir():
        raise CorpusError(f"{option} {target} is a folder; name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_takes_files(target.parent)
    except OSError as error:
        raise CorpusError(f"{option} {target}: its folder takes no files ({error}); name another file") from error


def check_takes_files(folder: Path) -> None:
    """Raise OSError unless `folder` can be written to."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_manifest(manifest: Path, taken: Path) -> None:
    try:
        fields = read_manifest(manifest)
    except IndexMismatchError:
        fields = None
    if fields is None or not fields.keys() >= _EVERY_MANIFEST:
        raise TargetTakenError(
            f"{taken} was not written by the index builder and is not replaced; pass another --save_dir or move it away"
        )


def umask() -> int:
    """The permissions that files of this process do not get."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
