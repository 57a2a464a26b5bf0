"""CONTRIBUTING.md names code that exists: the functions of its walks, and every room of the search."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMES = re.findall(
    r"`((?:verl|search_r1)\.[\w.]+\.\w+)`", "".join(re.findall(r"## A \w+.*?, from .*?(?=\n## )", TEXT, re.DOTALL))
)


def test_both_walks_are_read() -> None:
    assert {name.split(".")[0] for name in NAMES} == {"verl", "search_r1"}
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_of_a_walk_is_a_function_or_a_class(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_the_map_has_every_room_of_the_search() -> None:
    table = TEXT.partition("## Rooms of the search")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(search_r1/[\w/]+)`", table, re.MULTILINE))
    folders = {file.parent for file in (ROOT / "search_r1" / "search").rglob("__init__.py")}
    rooms = {folder.relative_to(ROOT).as_posix() for folder in folders}
    assert listed == rooms | {"search_r1/http", "search_r1/data/corpus"}


def test_no_room_is_a_hall() -> None:
    folders = [folder for folder in (ROOT / "search_r1").rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    counts = {folder.as_posix(): sum(entry.is_file() for entry in folder.iterdir()) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > 25} == {}
