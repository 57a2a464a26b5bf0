"""Checksums of large files, and the record of them next to the files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from long_task import BYTES, Progress
from search_r1.data.hub.listing import RemoteFile
from verl.errors import DataError

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
        """Store the entry on disk at once."""
        self._entries[name] = entry
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(self._entries, indent=2, sort_keys=True) + "\n")
        unfinished.replace(self._path)
