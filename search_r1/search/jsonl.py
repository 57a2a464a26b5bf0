"""JSON-lines files read once, in order, in constant memory, with a progress bar."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from long_task import reading
from search_r1.errors import CorpusError
from search_r1.search.sanitize import whole_characters
from text_file import no_file

_LOG = logging.getLogger(__name__)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes with the newline) of each line of a `.jsonl` or `.jsonl.gz` file. Raises `CorpusError`."""
    if reason := no_file(path):
        raise CorpusError(f"{path} {reason}; pass a .jsonl or .jsonl.gz file")
    number = 0
    try:
        with reading(path) as raw, gzip.open(raw) if path.suffix.lower() == ".gz" else nullcontext(raw) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line
    except PermissionError as error:
        raise CorpusError(f"{path} cannot be read: no permission; allow reading it") from error
    except (EOFError, zlib.error, OSError) as error:
        raise CorpusError(f"{path} cannot be read after line {number}: {error}; fetch the file again") from error
    if number == 0:
        raise CorpusError(f"{path} is empty; pass a .jsonl or .jsonl.gz file with rows")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, decoded JSON object) of each line, U+FFFD for half characters. Raises `CorpusError`."""
    for number, line in read_lines(path):
        try:
            value = whole_characters(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{path}, line {number}: {why_no_json(line, error)}; each line must be a JSON object"
            ) from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise CorpusError(f"{path}, line {number}: a JSON {kind}; each line must be a JSON object")
        yield number, value


def why_no_json(line: bytes, error: Exception) -> str:
    """Why a line is no JSON, from what `json.loads` raised."""
    if isinstance(error, UnicodeDecodeError):
        return (
            f"not UTF-8: {error} of the line; save the file as UTF-8, or convert it from its encoding, such as "
            "Latin-1: iconv -f LATIN1 -t UTF-8"
        )
    return str(error) if line.strip() else "blank line"


# Random access needs uncompressed bytes: decompress a `.gz` file once, into a cache file.


def open_plain_copy(path: Path) -> BinaryIO:
    """The decompressed copy of `path` in the temporary folder (`TMPDIR` moves it), open for reading.

    There is one copy of a file: a source with another size or modification time replaces it. A process that has the
    earlier copy open keeps reading that one. Raises `CorpusError`.
    """
    folder = _private_folder() / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    with _locked(folder, path):
        # One process at a time: the others then find the copy, and nobody needs what else is in the folder.
        version = _version(path)
        target = folder / f"{version}.jsonl"
        for other in folder.iterdir():
            if other != target:
                other.unlink()
        if not target.is_file():
            _decompress(path, target)
            if _version(path) != version:
                target.unlink()
                raise CorpusError(f"{path} changed while it was decompressed; start again when it is complete")
        return target.open("rb")


def _version(path: Path) -> str:
    info = path.stat()
    return f"{info.st_size}-{info.st_mtime_ns}"


@contextmanager
def _locked(folder: Path, source: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.info("waiting for another process that decompresses %s", source)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _private_folder() -> Path:
    """A folder under the temporary folder that only this user can write to."""
    folder = Path(tempfile.gettempdir()) / f"search_r1_corpus_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise CorpusError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder


def _decompress(source: Path, target: Path) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    _LOG.info("decompressing %s to %s", source, target)
    try:
        with (
            reading(source, f"decompress {source.name}") as raw,
            gzip.open(raw) as packed,
            os.fdopen(handle, "wb") as plain,
        ):
            shutil.copyfileobj(packed, plain, 1 << 20)
        os.replace(name, target)
    except (EOFError, zlib.error, OSError) as error:
        Path(name).unlink(missing_ok=True)
        raise CorpusError(f"cannot decompress {source} to {target}: {error}") from error
