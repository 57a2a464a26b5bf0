"""Text files, found by name in a folder of this package, or by path."""

from __future__ import annotations

from pathlib import Path

from verl.errors import ConfigError


def names_in(folder: Path) -> list[str]:
    """The names of the text files in `folder`."""
    return sorted(path.stem for path in folder.glob("*.txt"))


def read_text_file(kind: str, name_or_path: str, folder: Path) -> tuple[Path, str]:
    """Path and text of a file in `folder`, or at any path; `kind` is what the `ConfigError` calls it."""
    shipped = folder / f"{name_or_path}.txt"
    path = shipped if shipped.is_file() else Path(name_or_path).expanduser()
    if not path.is_file():
        names = ", ".join(names_in(folder))
        raise ConfigError(f"no {kind} {name_or_path!r}: give the path of a text file, or one of {names}")
    return path, path.read_text(encoding="utf-8")
