"""JSON-lines files read once, in order, in constant memory, with a progress bar."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from long_task import reading
from search_r1.errors import CorpusError
from search_r1.search.sanitize import whole_characters

_LOG = logging.getLogger(__name__)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes with the newline) of each line of a `.jsonl` or `.jsonl.gz` file. Raises `CorpusError`."""
    if not path.is_file():
        raise CorpusError(f"{path} does not exist; pass a .jsonl or .jsonl.gz file")
    with reading(path) as raw, gzip.open(raw) if path.suffix.lower() == ".gz" else nullcontext(raw) as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
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


def plain_copy(path: Path) -> Path:
    """The decompressed copy of `path` in the temporary folder (`TMPDIR` moves it).

    Its name includes size and modification time, so a changed source gets a new copy. Raises `CorpusError`.
    """
    info = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()[:24]
    target = _private_folder() / f"{key}.jsonl"
    return target if target.is_file() else _decompress(path, target)


def _private_folder() -> Path:
    """A folder under the temporary folder that only this user can write to."""
    folder = Path(tempfile.gettempdir()) / f"search_r1_corpus_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise CorpusError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder


def _decompress(source: Path, target: Path) -> Path:
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
    return target
