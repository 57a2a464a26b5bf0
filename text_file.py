"""Text files that people write or export: templates, lists, keys, settings, tables.

They are UTF-8, with or without the byte order mark that editors and spreadsheets put in front. In another encoding, a
file is refused with the place of the first byte that does not fit. This module imports nothing of the project, so that
every room may use it.
"""

from __future__ import annotations

import codecs
import gzip
import stat
from collections.abc import Callable
from pathlib import Path

_MARK = "\ufeff"
_BLOCK = 1 << 20
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path, refuse: Callable[[str], Exception]) -> str:
    r"""The text of a file, without a byte order mark, every line end as \n.

    Raises `refuse(message)` if the file cannot be read or is not UTF-8 text. No message shows what is in the file,
    which may be a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise refuse(not_utf8(path)) from None  # the error holds the bytes
    if "\0" in text:
        raise refuse(f"{path}: has NUL characters, as UTF-16 has; save it as UTF-8")
    return text.lstrip(_MARK)


def no_file(path: Path) -> str:
    """Why `path` is no file that can be read more than once: what it is, or that it is not there. "" for a file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if stat.S_ISREG(mode):
        return ""
    return "is a folder" if stat.S_ISDIR(mode) else "is a pipe or a device: save what it gives in a file"


def not_utf8(path: Path) -> str:
    """The message for a file, also a `.gz`, that is not UTF-8: which byte, on which line, and what to do."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place, line = 0, 1
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        while block := file.read(_BLOCK):
            if place == 0 and block.startswith(_OTHER_MARKS):
                return f"{path}: is UTF-16, not UTF-8; save it as UTF-8, or convert it: iconv -f UTF-16 -t UTF-8"
            waiting = len(decoder.getstate()[0])  # bytes of a character that began in the block before
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                before = error.start - waiting
                place, line = place + before, line + block.count(b"\n", 0, max(0, before))
                break
            place, line = place + len(block), line + block.count(b"\n")
    return (
        f"{path}:{line}: not UTF-8: byte {place} of the file, on line {line}, does not fit; save it as UTF-8, or "
        f"convert it from the encoding that it has, such as Latin-1: iconv -f LATIN1 -t UTF-8"
    )
