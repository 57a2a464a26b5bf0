"""Find the files below folders, each once, and give each a name that stays the same from run to run.

The name is the path below the folder that holds everything given: below the folder itself if that is one. In a name a
backslash, a control character and a byte that is not UTF-8 are written as escapes, so that names stay different.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from long_task import Progress
from search_r1.errors import CorpusError

PULSE_S = 5.0
"""The longest silence in a log file while documents are found and read."""


@dataclass
class Found:
    """`files`: those to read, by name. `left_out`: why others cannot be. `links`: why some are not followed."""

    files: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)


def find_files(given: Sequence[Path], with_hidden: bool = False, not_read: Sequence[Path] = ()) -> Found:
    """All files of the folders and files `given`, but for those `not_read`. Raises `CorpusError` if one is missing."""
    for path in given:
        if not path.exists():
            raise CorpusError(f"{path} does not exist; pass folders or files of documents")
    search = _Search([Path(os.path.abspath(path)) for path in given], with_hidden)
    search.ignored = {os.path.realpath(path) for path in not_read}
    with Progress("find documents", unit="files", quiet_s=PULSE_S) as progress:
        search.run(progress)
    search.found.files = dict(sorted(search.found.files.items(), key=lambda item: item[0].split("/")))
    return search.found


class _Search:
    """Links are followed after everything else, so that a file has the name that it has without them."""

    def __init__(self, given: list[Path], with_hidden: bool) -> None:
        self.found, self.ignored = Found(), set[str]()
        self._base = os.path.commonpath([path if path.is_dir() else path.parent for path in given])
        self._with_hidden = with_hidden
        self._names: dict[str, str] = {}  # by real path
        self._waiting = [os.fspath(path) for path in reversed(given)]
        self._links: list[str] = []

    def run(self, progress: Progress) -> None:
        while self._waiting or self._links:
            if not self._waiting:
                self._links.sort(reverse=True)
            path = (self._waiting or self._links).pop()
            try:
                self._take(path)
            except OSError as error:
                self.found.left_out[self._name(path)] = reason_of(error)
            progress.reach(len(self.found.files))

    def _take(self, path: str) -> None:
        name, mode, real = self._name(path), os.stat(path).st_mode, os.path.realpath(path)
        if real in self.ignored:
            return
        # Everything is read once: another path to it is noted as a link, unless just the same path was given again.
        if real in self._names:
            if name != self._names[real]:
                self.found.links[name] = f"leads to {self._names[real]}, which is read anyway"
            return
        if f"{os.path.realpath(os.path.dirname(path))}/".startswith(f"{real}/"):
            self.found.links[name] = "leads to a folder that it is in"
            return
        if stat.S_ISDIR(mode):
            self._open(path)
        elif stat.S_ISREG(mode):
            self.found.files[name] = Path(path)
        else:
            self.found.left_out[name] = "neither a file nor a folder"
        self._names[real] = name

    def _open(self, folder: str) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith(".") and not self._with_hidden:
                    self.found.hidden.append(self._name(entry.path))
                else:
                    (self._links if entry.is_symlink() else self._waiting).append(entry.path)

    def _name(self, path: str) -> str:
        name = os.path.relpath(path, self._base)
        return "".join(map(_shown, name)) if not name.isprintable() or "\\" in name else name


def reason_of(error: OSError) -> str:
    """Why a file cannot be read, without its path: `Permission denied`."""
    return error.strerror or str(error)


def _shown(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python writes a byte of a name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character == "\\":
        return "\\\\"
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
