"""One module for each format of rows: `KEYS`, which tell it, and `fields(row)`, what it says.

A row has the format of the first module whose keys are all in it. A `ValueError` from `fields` is a fault of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from search_r1.data.qa.formats import (
    bamboogle,
    flashrag,
    hotpotqa,
    musique,
    plain,
    popqa,
    strategyqa,
    triviaqa,
)

FORMATS = (flashrag, popqa, musique, hotpotqa, strategyqa, triviaqa, bamboogle, plain)


def format_of(rows: Iterable[Mapping[str, Any]]) -> ModuleType | None:
    """The format of the first row that has one."""
    return next((found for row in rows for found in FORMATS if row.keys() >= found.KEYS), None)


def known_formats() -> str:
    return "; ".join(f"{found.__name__.rpartition('.')[2]} ({', '.join(sorted(found.KEYS))})" for found in FORMATS)
