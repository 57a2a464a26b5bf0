"""Random access needs uncompressed bytes: decompress a `.gz` file once, into a cache file."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import tempfile
import zlib
from pathlib import Path

from long_task import reading
from search_r1.errors import CorpusError

_LOG = logging.getLogger(__name__)


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
