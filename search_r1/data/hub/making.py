"""Join parts into one file, or decompress a file (streamed, and the result appears only once it is complete), and the
checksums of large files, recorded next to them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from long_task import BYTES, Progress, reading
from search_r1.data.hub.artifacts import RemoteFile
from verl.errors import DataError
from verl.process.storage import whole_file

RECORD_NAME = "checksums.json"
BLOCK = 1 << 22


def sha256_of(path: Path) -> str:
    return _digest(path, 0, path.stat().st_size, hashlib.sha256())


def is_whole(path: Path, remote: RemoteFile) -> bool:
    """Whether `path` has the size and the checksum that the hub lists."""
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    return _matches(path, 0, remote)


def is_joined(path: Path, parts: Sequence[RemoteFile]) -> bool:
    """Whether `path` is the concatenation of `parts`, by the checksum of each part."""
    if not path.is_file() or path.stat().st_size != sum(part.size for part in parts):
        return False
    starts = [sum(part.size for part in parts[:number]) for number in range(len(parts))]
    return all(_matches(path, start, part) for start, part in zip(starts, parts, strict=True))


def _matches(path: Path, start: int, remote: RemoteFile) -> bool:
    if remote.sha256:
        return _digest(path, start, remote.size, hashlib.sha256()) == remote.sha256
    # git's name of a file: SHA-1 of its type, its length and its content
    digest = hashlib.sha1(f"blob {remote.size}\0".encode(), usedforsecurity=False)
    return _digest(path, start, remote.size, digest) == remote.blob_id


def _digest(path: Path, start: int, size: int, digest: Any) -> str:
    with (
        path.open("rb") as file,
        Progress(f"check {path.name}", size, unit=BYTES) as progress,
    ):
        file.seek(start)
        while size and (block := file.read(min(BLOCK, size))):
            digest.update(block)
            size -= len(block)
            progress.update(len(block))
    return str(digest.hexdigest())


class ChecksumFile:
    """`checksums.json`: for each file name, its state when it was last verified."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD_NAME
        try:
            self._entries = json.loads(self._path.read_bytes()) if self._path.exists() else {}
        except ValueError as error:
            raise DataError(f"{self._path} is no JSON ({error}); remove it, then everything is checked anew") from error

    def get(self, name: str) -> dict[str, Any]:
        """The entry of `name`; {} if there is none."""
        return dict(self._entries.get(name, {}))

    def set(self, name: str, entry: dict[str, Any]) -> None:
        """Store the entry on disk at once. Raises `StorageError`."""
        self._entries[name] = entry
        with whole_file(self._path) as unfinished:
            unfinished.write_text(json.dumps(self._entries, indent=2, sort_keys=True) + "\n")


_TAR_MAGIC, _TAR_MAGIC_AT, _TAR_HEADER = b"ustar", 257, 512
_GB = 10**9


class _HashedFile:
    """A file that takes the SHA-256 of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        return self._file.write(block)


def join(parts: Sequence[Path], product: Path) -> str:
    """Concatenate `parts` into `product`; returns its SHA-256."""

    def copy(target: _HashedFile) -> None:
        for part in parts:
            with reading(part) as source:
                shutil.copyfileobj(source, target, BLOCK)

    return _write(product, copy)


def unpack(packed: Path, product: Path) -> str:
    """Decompress a gzip file; from a tar archive, extract its only .jsonl file. Returns the SHA-256 of `product`.

    The corpus on the hub has existed in both forms, under the same name. Raises `DataError` if it cannot be read.
    """

    def copy(target: _HashedFile) -> None:
        try:
            with reading(packed) as raw, gzip.open(raw) as plain:
                # Only the content says which form it is. `peek` leaves the header for the reader that comes next.
                magic = plain.peek(_TAR_HEADER)[_TAR_MAGIC_AT : _TAR_MAGIC_AT + len(_TAR_MAGIC)]
                if magic == _TAR_MAGIC:
                    _copy_member(packed, plain, target)
                else:
                    shutil.copyfileobj(plain, target, BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
            raise DataError(f"{packed} cannot be unpacked: {error}; remove it and fetch it again") from error

    return _write(product, copy)


def require_disk(folder: Path, needed: int, what: str) -> None:
    """Raises `DataError` if `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{what} needs {needed / _GB:.1f} GB more in {folder}, which has {free / _GB:.1f} GB free")


def _copy_member(packed: Path, plain: gzip.GzipFile, target: _HashedFile) -> None:
    found = 0
    with tarfile.open(fileobj=plain, mode="r|") as archive:
        for member in archive:
            if not member.isfile() or not member.name.endswith(".jsonl"):
                continue
            source = archive.extractfile(member)
            assert source is not None
            shutil.copyfileobj(source, target, BLOCK)
            found += 1
    if found != 1:
        raise DataError(f"{packed} is an archive with {found} .jsonl files, not one; unpack it by hand")


def _write(product: Path, copy: Callable[[_HashedFile], None]) -> str:
    with whole_file(product) as unfinished, unfinished.open("wb") as file:
        target = _HashedFile(file)
        copy(target)
    return target.digest.hexdigest()
