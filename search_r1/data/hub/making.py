"""Join parts into one file, or decompress a file: streamed, and the result appears only once it is complete."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from long_task import reading
from search_r1.data.hub.checksums import BLOCK
from verl.errors import DataError

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
    unfinished = product.with_name(f".{product.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            target = _HashedFile(file)
            copy(target)
        unfinished.replace(product)
        return target.digest.hexdigest()
    finally:
        unfinished.unlink(missing_ok=True)
