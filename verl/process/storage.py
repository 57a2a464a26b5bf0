"""Files on the disk: written whole or not at all, their digests, and errors that say what to do.

In many containers the home folder cannot be written: `work_without_home` has caches and Ray's token go elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from verl.errors import ConfigError, StorageError, translated

log = logging.getLogger(__name__)

Digests = dict[str, tuple[int, str]]
"""The size in bytes and the SHA-256 in hex of each file, by its name."""
LOCK = "owner.lock"
_FULL_BYTES = 2**20  # when less than this is left, a write failed for lack of space
_NO_FOLDER = "a file has the name of its folder; move it away or name another folder"
_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "the disk is full; make room there",
    errno.EDQUOT: "the disk quota is used up; make room there",
    errno.EROFS: "the file system is read-only; mount it for writing",
    errno.EACCES: "no permission; allow writing there",
    errno.EPERM: "no permission; allow writing there",
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
}


def could_not_write(path: Path | str, error: BaseException) -> str:
    """A message that names the path, the reason and what to do.

    Some libraries pass the operating system's reason on in words, and some not at all: then the free space decides.
    """
    number = _reason(error)
    if number is None and free_bytes(Path(path)) < _FULL_BYTES:
        number = errno.ENOSPC
    return f"{path} could not be written: {_ADVICE.get(number, f'{error}; check the disk')} and start again"


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that `path` is on, or would be."""
    return shutil.disk_usage(nearest_folder(path)).free


def digest(path: Path) -> tuple[int, str]:
    """The size in bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return digest_of(file)


def digest_of(file: BinaryIO) -> tuple[int, str]:
    """The size in bytes and the SHA-256 of an open file, from its beginning."""
    found, size = hashlib.sha256(), 0
    while block := file.read(1 << 20):
        found.update(block)
        size += len(block)
    return size, found.hexdigest()


def writing(path: Path | str) -> contextlib.AbstractContextManager[None]:
    """Raise StorageError in place of an OSError of the block, which writes to `path`."""
    return translated(OSError, lambda error: StorageError(could_not_write(path, error)))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end of the block becomes `path`, which appears whole or not at all.

    Makes the folder. Raises StorageError.
    """
    temporary = _beside(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A hidden name that nobody else has: in containers, all processes may have the same id."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def check_unused(folder: Path) -> None:
    """Raise `ConfigError` unless `folder`, an --output_dir, does not exist yet, or is an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"--output_dir {folder} is in use; name a folder that does not exist")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, beside `path`; at the end of the block it becomes `path`, which appears whole or not at
    all. `path` may be an empty folder before, which is replaced. Raises StorageError.
    """
    path = path.absolute()
    temporary = _beside(path)
    with writing(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def share(folder: Path) -> None:
    """Give the files of a folder the permissions of files that are simply written: a library that writes through a
    temporary file leaves them to the owner alone.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~mask)


def append(path: Path, record: bytes) -> None:
    """Add `record` to the end of a file, all of it or nothing. Raises StorageError."""
    with writing(path), path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        left = memoryview(record)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that end, with their ends; none if there is no file. Raises OSError."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def cut_unfinished_line(path: Path) -> None:
    """Remove what a process that was killed while it wrote left behind the last end of line. Raises StorageError."""
    with writing(path):
        if not path.exists():
            return
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException | None) -> int | None:
    """The operating system's number of the error, or of one that it came from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if said := re.search(r"os error (\d+)", str(error)):  # how Rust libraries put it
            return int(said.group(1))
        error = error.__cause__ or error.__context__
    return None


MAX_SOCKET_PATH = 107  # bytes; from sys/un.h of Linux


def folder_for_sockets(name: str) -> Path:
    """The temporary folder, or /tmp if the path of a socket `name` in the former were longer than Linux allows."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode((folder / name).absolute())) <= MAX_SOCKET_PATH else Path("/tmp")


# Temporary folders that are removed soon after their owner ends, however it ends.


class OwnedFolder:
    """A folder `{prefix}...` in `parent` (None: the temporary folder) that is removed with its owner.

    A killed owner leaves it behind; the next owner of such a folder removes those whose lock is free.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for lock in parent.glob(f"{prefix}*/{LOCK}"):
            with contextlib.suppress(OSError), lock.open() as file:  # another user's, or another owner was faster
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock = (hidden / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = hidden.rename(parent / hidden.name[1:])  # others see it only now that its lock is taken

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


CACHES = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}
"""Variables of the libraries that write to the home folder, and the folders that they get instead."""


def work_without_home() -> None:
    """If the home folder cannot be written, let the libraries write to a folder of this user's in the temporary folder,
    and say so. To be called before they are imported. Variables that are set stay.
    """
    # A user whom the system does not know, as in many containers, has none: then this is "~", which does not exist.
    home = Path(os.path.expanduser(os.environ.get("HOME") or "~"))
    if home.is_dir() and os.access(home, os.W_OK | os.X_OK):
        return
    # The same folder in every run of this user, so that caches can be used again.
    folder = Path(tempfile.gettempdir()) / f"search-r1-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # somebody else made it, to read what goes there
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    models = home / ".cache" / "huggingface"
    if models.is_dir() and not os.environ.get("XDG_CACHE_HOME"):
        os.environ.setdefault("HF_HOME", str(models))  # what was downloaded is still read there
    for name, place in CACHES.items():
        os.environ.setdefault(name, str(folder / place))
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray would write one to the home folder
    log.warning("HOME=%s cannot be written: caches go to %s; set HOME to a folder that can be written", home, folder)
